"""One rank's training step, from a batch to updated parameters.

engine                what trains, evaluates, generates and saves on one rank; a step is on one screen there
local_model           this rank's part of the model, and what runs a batch on it
update                the optimizer's half of a step; engine_optimizer: the user's optimizer on what a rank owns
evaluation            losses, scores and tokens without training
saver                 the state, into files and to another plan
forward               what runs a forward-only program
module                a program as an nn.Module for a custom loop: its forward; module_running: what it holds, how
                      backward begins and ends, when its parameters are gathered; module_state: what it saves and loads;
                      module_parts: its submodules, of the model's classes
step_graph            forward, backward and sums of a step as one CUDA graph
loss_scale            loss scaling for float16, the same on all ranks
means                 losses and outputs over batches
batch_sizes           programs for batches of other sizes than were compiled, and for evaluating
param_groups          the optimizer's parameter groups by name, and by the shapes of whole parameters
lr                    learning-rate schedulers, also in place of a checkpoint's
resumed               what a checkpoint replaced of an engine's settings
expert_load           how tokens were spread over experts
"""
