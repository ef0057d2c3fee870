"""What an engine and a module check of the user's code, beside their step. Not checked: docs/reference/not-checked.md.

moments             when checks look: with check=False nothing does; checks: what an engine and a module have in common;
                    engine_checks, module_checks: what each looks at, at which moment
engine_options      options that do not exist, or that mean nothing
shared_facts        what all ranks share: program, options, batch, learning rates (compared in shardc.runtime.mesh)
user_changes        the model that was compiled: frozen, hooked, other modes or attributes; given_model: the model that
                    an engine took its weights from
loop_watch          what a loop does between two forwards, the same on all ranks; optimizer_watch: its optimizer, before
                    the first step; both see all optimizers by every_optimizer
tensor_parts        parameters and gradients of which a rank has a part: they refuse what mixes elements;
                    parameter_parts: which parameters these are
state_dict_marks    whose slices a module's state_dict has; optimizer_marks: an optimizer's
stepped_once        an optimizer, a schedule or a loss that an engine has stepped already
"""
