"""What rules are made of.

notation, op_call       what a rule is written in; what it gets to see of a call
registry                all rules, by op; user_ops: those of users
choices, strategy       the ways to run one call on one mesh axis, derived from its rule
finite_padding          what padding has to hold where an op reads it
shared_signatures       what rules of several families have in common
sample_calls            calls of ops, on which their rules are proven (shardc.verify.rules)
reduce_parts            norms, products and extrema over a dim that stays split
along_split_dim         cumulative sums and convolutions along a dim that stays split
"""
