"""One rank's training step, from a batch to updated parameters.

engine                what trains, evaluates, generates and saves on one rank: how it is made; engine_step: takes a
                      batch, runs forward and backward, sums gradients, updates; engine_forward: losses, scores and
                      tokens without training; engine_state: what it saves, loads and hands out; engine_optimizer: the
                      user's optimizer on what a rank owns
forward               what runs a forward-only program
module                a program as an nn.Module for a loop of one's own: its forward; module_running: what it holds, how
                      backward begins and ends; module_state: what it saves, loads and hands out; module_parts: its
                      submodules, of the model's classes; state_dict_marks: whose slices its state has
parameter_updates     whether a module's parameters changed, and are to be gathered
joint_function        the graphs of a stage as a differentiable function
step_graph            forward, backward and sums of a step as one CUDA graph
shared_facts          what the ranks of an engine or a module have to share
loss_scale            loss scaling for float16, on all ranks alike
means                 losses and outputs over batches
batch_sizes           batches of other sizes than were compiled
parameter_norms       the norm of each parameter and its gradient
tensor_parts          parameters and gradients of which a rank has a part: they refuse what mixes elements;
                      parameter_parts: which parameters these are
stepped_once          an optimizer or schedule that is stepped beside the engine
stepped_loss          the loss that a step returns: its backward is done
not_finite            a loss or gradient that is nan or inf: stop or skip, and what made it
engine_options        options that there are not, or that mean nothing
user_changes          what users do to a module that a program would not notice; optimizer_watch: its optimizer;
                      optimizer_marks: whose slices its state is of;
                      loop_watch: what a loop does between two forwards, alike on all ranks; both see optimizers by
                      every_optimizer; given_model: what they do to the model that the weights came from
evaluating            which program evaluates: that of a step, or one of the model in eval mode
param_groups, lr      the optimizer's parameter groups by name; learning-rate schedulers
whole_shapes          groups by a parameter's shape: by that of the whole one
resumed               what a checkpoint replaced of an engine's settings; new_schedule: what it is not to replace
expert_load           how tokens were spread over experts
"""
