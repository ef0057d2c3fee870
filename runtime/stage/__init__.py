"""Run the graphs of a program's stages on one rank.

interpreter         the stages of one rank: a step, a forward, an evaluation; run: the actions of one of these, in
                    order: stages forward and backward, sends, receives
runnable            a stage as a function; bindings: the fastest Python call of each op
joint_stage         a stage as its forward and backward graphs; repeated_lines: marks lines that recompute;
                    joint_function: these graphs as a differentiable function
communicators       the process groups that a program needs
activation_offload  keeps values on the CPU from forward to backward
outputs             the values of a step beside its loss, over microbatches and ranks; mixed_sizes: sums over
                    microbatches of several sizes
clip_grad_norm      the norm of the whole gradient, and clipping by it; the norm of each parameter
not_finite          a loss or gradient that is nan or inf: stop or skip, and find the op that made it
op_errors           explains an op that fails in the user's terms; profiler_ranges: shows each node in a trace
"""
