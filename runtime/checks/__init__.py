"""Check the user's code around an engine or a module. Not checked: docs/reference/not-checked.md.

hooks               when checks run: with check=False none does; checks: checks that engine and module share;
                    engine_checks, module_checks: what each checks, at which moment
engine_options      options that do not exist, or have invalid values
shared_facts        what all ranks share: program, options, batch, learning rates (compared in shardc.runtime.mesh)
user_changes        changes of the compiled model: frozen, hooked, other modes or attributes; given_model: changes of
                    the model that an engine took its weights from
loop_watch          what a loop does between two forwards, the same on all ranks; optimizer_watch: its optimizer, before
                    the first step; both see all optimizers by every_optimizer
tensor_parts        parameters and gradients of which a rank has a part: they refuse ops that mix elements;
                    parameter_parts: which parameters these are
state_dict_marks    marks whose slices a module's state_dict has; optimizer_marks: an optimizer's
stepped_once        refuses a second step of an optimizer, a schedule or a loss that an engine has stepped
"""
