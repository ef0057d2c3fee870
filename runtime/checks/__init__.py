"""Check the user's code around an engine or a module. Not checked: docs/reference/not-checked.md.

hooks               when checks run: with check=False none does; checks: checks that engine and module share;
                    engine_checks, module_checks: what each checks, at which moment
engine_options      options that do not exist, or have invalid values
shared_facts        what all ranks share: program, options, batch, learning rates (compared in shardc.runtime.mesh)
user_changes        a model as it was, and what changed since: frozen, hooked, replaced, other modes or attributes
optimizer_steps     every optimizer that steps, seen by one hook; refuses a second step of an engine's
loop_watch          the loop around a module: its optimizer before the first step, and what differs between ranks
tensor_parts        parameters and gradients of which a rank has a part: they refuse ops that mix elements
marks               which tensors are parts, and marks in state dicts, so that another rank does not load them
callbacks           the user's callbacks, called at the moments of a run
padding             a loss that depends on what fills up rows
detached            a loss whose backward has run, and values beside a loss, which have no gradient
"""
