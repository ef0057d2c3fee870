"""The proof without running: every rank's program is type-checked against the model as one device runs it.

What is trusted: the rules of ops (each is proven by itself, shardc.verify.rules), the table of conversions
(shardc.ir.conversions), and of backward graphs the derivative of each call by itself (shardc.passes.joint.derivatives:
it is what autograd runs). What is checked: everything that the compiler made of them. No code of placement, partition
or the passes after them is used, so that a mistake there is not made twice.

statement          what is claimed of a value of a rank's text: this slice, replica or summand of a value of the model
conversion_types   what a conversion makes of such a claim, by its arguments
op_types           by which rule an op computes its claim, and what the rule makes of the op for a rank's part
chunked_loss       losses that are computed in chunks of rows, together with the layer before them
same_values        when two calls give one value, in the model's graph and in texts
text               one text, line by line: each op is the model's, on operands that are claimed
follow             lines that are no op of the model's: conversions, casts, sums; bucket_reads: parameters in buckets
gradient_sums      every parameter's gradient ends summed over exactly the right axes, once; each element has one owner
matrix_owners      each matrix of an optimizer over whole matrices has one owner, and its elements come there and back
terms              values as ops on ops, down to what a text is given
chain_rule         a stage's gradients as such terms, by the chain rule
joint_graphs       the graphs of a stage: they compute its results and these gradients
pair_halves        the text of an overlapped pair as two of them
assumptions        what is taken for true, each with the test that checks it
proof              the whole program: texts, microbatches, stages, schedule, buckets; the verdict

Work is done once for a text, whatever the number of ranks: claims are the same on all of them.
"""

from shardc.verify.static.proof import Gap, Proof, prove, prove_within

__all__ = ["Gap", "Proof", "prove", "prove_within"]
