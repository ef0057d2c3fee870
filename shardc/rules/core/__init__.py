"""Define what rules are made of.

notation, op_call       the language of rules; the view of a call that a rule gets
registry                all rules, by op
user_ops                rules of users' ops, and sample calls on which rules are proven (shardc.verify.rules)
choices, strategy       the ways to run one call on one mesh axis, derived from its rule
finite_padding          the numbers that padding must have where an op reads it
shared_signatures       signatures that rules of several families share
reduce_parts            norms, products and extrema over a dim that stays split
along_split_dim         cumulative sums and convolutions along a dim that stays split
"""
