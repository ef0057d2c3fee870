"""Prove without running that every rank's program computes what the model does on one device.

Each text (a graph that a rank runs) is type-checked against the model's graph. Trusted: the rules of ops (each is
proven separately, shardc.verify.rules), the table of conversions (shardc.ir.conversions), and in backward graphs the
derivative of each single call (shardc.passes.joint.derivatives: it is what autograd runs). Checked: everything that
the compiler made of them. No code of placement, partition or later passes is used, so their mistakes do not repeat.

statement          the claim about a value in a text: this slice, replica or summand of a value of the model
conversion_types   the claim of a conversion's result, from its arguments
op_strategies      by which strategies an op computes its claim, and its lines on a rank
chunked_loss       losses that are computed in chunks of rows, together with the layer before them
same_values        when two calls have the same value, in the model's graph and in texts
text               checks one text line by line: each op is the model's, on operands with claims
follow             lines that are no op of the model: conversions, casts, sums, reads of parameters in buckets
gradient_sums      each gradient is summed over exactly the right axes, once; each element has one owner
terms              values as terms: ops on ops, down to the inputs of a text
chain_rule         a stage's gradients as terms, by the chain rule
joint_graphs       the joint graphs of a stage, also in overlapped pairs: they compute its results and these gradients
assumptions        what the proof assumes, each with the test that checks it
proof              the whole program: texts, microbatches, stages, schedule, buckets; the verdict

A text is checked once, for all ranks that run it: its claims are the same on each.
"""

from shardc.verify.static.proof import Gap, Proof, prove, prove_within

__all__ = ["Gap", "Proof", "prove", "prove_within"]
