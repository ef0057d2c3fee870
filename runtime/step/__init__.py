"""Run one rank's training step, from a batch to updated parameters.

engine                trains, evaluates, generates and saves on one rank; shows a whole step on one screen
local_model           this rank's part of the model, and the interpreter that runs a batch on it
update                the optimizer's half of a step; engine_optimizer: makes the user's optimizer on this rank's shards
evaluation            losses, scores and tokens without training
engine_state          what an engine saves to files and loads, and moves to another plan
forward               runs a forward-only program
module                a program as an nn.Module for a custom loop: its forward; module_running: what it holds, how
                      backward begins and ends, when its parameters are gathered; module_state: what it saves and loads;
                      module_parts: its submodules, of the model's classes
step_graph            forward, backward and gradient sums of a step as one CUDA graph
loss_scale            loss scaling for float16, the same on all ranks
means                 exact means of losses and outputs over batches
batch_sizes           programs for batches of other sizes than the compiled ones, and for evaluation
param_groups          the optimizer's parameter groups by name, and by the shapes of whole parameters
schedulers            step torch's learning-rate schedulers, which the model file makes; those of a checkpoint
resumed               settings of an engine that a checkpoint replaced
expert_load           how tokens were spread over experts
"""
