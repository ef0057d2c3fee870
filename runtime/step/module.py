"""Run a program as an nn.Module in a custom loop: the model's parameter names, gradients as of DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import named_nearest
from shardc.runtime.checks import engine_options, tensor_parts
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.checks.module_checks import ModuleChecks
from shardc.runtime.data import inputs
from shardc.runtime.mesh import replicas
from shardc.runtime.offload import Offload
from shardc.runtime.rng import Rng
from shardc.runtime.stage import op_errors, outputs
from shardc.runtime.stage.communicators import runtime_mesh
from shardc.runtime.state.parts import local_parts
from shardc.runtime.state.quantized import plain
from shardc.runtime.state.sources import weights_of
from shardc.runtime.step import engine_optimizer
from shardc.runtime.step.engine_optimizer import OptimizerOf
from shardc.runtime.step.module_parts import add_parts, parent_of
from shardc.runtime.step.module_running import Running
from shardc.runtime.step.module_state import ModuleState, check_marks, mark
from shardc.runtime.zero.buckets import Buckets


class ShardedModule(ModuleState):
    """One rank's part of a model, made by `program.module(model)`; arguments as of step.engine.Engine.

    Its state_dict has the model's own names (all names of a tied weight) with local shapes. `forward` takes this rank's
    part of a batch, as the model's forward would, and returns the global loss, 0-dim. When `loss.backward()` returns,
    the gradients are those of the global loss. User code may scale the loss, and may add terms that use whole
    parameters directly. Dropout draws new masks in every training forward; `eval()` switches it and BatchNorm as usual.

    At ZeRO >= 1 each parameter here, also in state_dict, is this rank's flat shard of it (1-d, perhaps empty). Any
    optimizer that updates every element separately works; group parameters by name, or by `p.ndim`, which is the
    whole's, not by shape. The next forward gathers the updates of other ranks.
    """

    #: Hooks on the module itself run; hooks on its submodules do not.
    runs_hooks = True

    def __init__(
        self,
        program: Program,
        model: Any,
        seed: int = 0,
        *,
        weights: Any = None,
        check: bool = True,
        check_every: int = replicas.CHECK_EVERY,
        broadcast: bool = False,
        mesh: Any = None,
    ) -> None:
        super().__init__()
        _check_supported(program)
        model = plain(model)
        mesh = mesh if mesh is not None else runtime_mesh(program)
        checks = ModuleChecks(program, mesh) if check else CheckHooks()
        checks.making(seed, broadcast=broadcast, check_every=check_every)
        checks.compare_every(check_every)
        loaded = weights_of(program, model, weights, seed)
        checks.weights(model, loaded)
        parts, buffers = local_parts(program, loaded, mesh, broadcast=broadcast, on_whole=checks.whole_weight)
        buckets = Buckets(program, checks.parts(parts), mesh, aliased=True)
        source = model if isinstance(model, nn.Module) else loaded.model
        self._register(Running(program, source, mesh, Rng(seed), buckets, checks), buffers, loaded.model)

    def _register(self, running: Running, buffers: Mapping[str, Tensor], like: Any) -> None:
        """Register parameters and buffers under the model's names. like: a module with the model's submodules."""
        program = running.program
        if isinstance(like, nn.Module):
            add_parts(self, like)
        for x in program.params:
            for fqn in (x.fqn, *x.aliases):
                parent, name = parent_of(self, fqn)
                parent._parameters[name] = running.buckets.owned[x.name]
        self._constants = {b.name: buffers[b.name] for b in program.buffers if not b.fqn}
        for b in program.buffers:
            for fqn in (b.fqn, *b.aliases) if b.fqn else ():
                parent, name = parent_of(self, fqn)
                parent._buffers[name] = buffers[b.name]
                if not b.persistent:
                    parent._non_persistent_buffers_set.add(name)
        for name in program.still:  # also modules without parameters, such as dropout: user code may read their mode
            parent_of(self, f"{name}.")[0].eval()
        self.register_state_dict_post_hook(mark)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(check_marks)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(running.updates.note)  # type: ignore[no-untyped-call]
        self._running = running
        running.read_buffers = WeakMethod(self._buffers_by_name)
        running.checks.new_model(running, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Copy the module with new parameters and buffers, on the same mesh, as weight averages need.

        (torch.optim.swa_utils.AveragedModel.) At ZeRO >= 1 collective: parameters are gathered.
        """
        r = self._running
        r.updates.carry_out()
        r.updates.finish_gather()
        owned = r.buckets.owned
        parts = (
            (name, nn.Parameter(whole.clone(), requires_grad=owned[name].requires_grad))
            for name, whole in r.buckets.wholes().items()
        )
        buckets, rng = Buckets(r.program, parts, r.mesh, aliased=True), Rng(r.rng.seed)
        rng.step = r.rng.step
        result = ShardedModule.__new__(ShardedModule)
        nn.Module.__init__(result)
        buffers = {name: b.clone() for name, b in self._buffers_by_name().items()}
        result._register(Running(r.program, r.model, r.mesh, rng, buckets, r.checks.copy(r.model)), buffers, self)
        memo[id(self)] = result
        memo.update({id(p): buckets.owned[name] for name, p in owned.items()})
        for copied, m in zip(result.modules(), self.modules(), strict=True):
            copied.training = m.training
        return result

    def __getattr__(self, name: str) -> Any:
        if name in engine_options.INSTEAD_OF_MODULE:
            fault = f"a module of a program has no {name!r}: {engine_options.INSTEAD_OF_MODULE[name]}"
            raise AttributeError(fault, name=name, obj=self)
        if name in engine_options.WRAPPERS:
            where, fault, fix = engine_options.WRAPPERS[name]
            raise ShardcError(fault, where=where, fix=fix)
        return super().__getattr__(name)

    def compile(self, *_: Any, **__: Any) -> None:
        """Refuse nn.Module's own call of torch.compile."""
        _ = self._torchdynamo_orig_callable

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter. Raises UnknownNameError, also an AttributeError, with the nearest name."""
        with named_nearest("get_parameter", "parameter", target, lambda: dict(self.named_parameters())):
            return super().get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """Return a buffer; raises as `get_parameter`."""
        with named_nearest("get_buffer", "buffer", target, lambda: dict(self.named_buffers())):
            return super().get_buffer(target)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule; raises as `get_parameter`."""
        with named_nearest("get_submodule", "submodule", target, lambda: dict(self.named_modules())):
            return super().get_submodule(target)

    def __reduce_ex__(self, protocol: Any) -> Any:
        fault = "a module of one rank of a running world cannot be pickled"
        fix = "save with module.save(folder, optimizer), or module.full_state_dict() of the whole model"
        raise ShardcError(fault, where="pickle of program.module(...)", fix=fix)

    def _buffers_by_name(self) -> dict[str, Tensor]:
        """Return {placeholder name: buffer}."""
        return {
            b.name: self.get_buffer(b.fqn) if b.fqn else self._constants[b.name] for b in self._running.program.buffers
        }

    def train(self, mode: bool = True) -> ShardedModule:
        """Set the mode. Notes once if the model was compiled in eval mode: then this enables no dropout."""
        self._running.checks.mode(training=mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the global loss of this rank's part of a batch, with values beside it: (loss, {name: value}).

        Values only if the loss function names some, as in Engine.step. Raises ShardcError for another part than
        compiled.
        """
        r = self._running
        with r.mesh.together(f"forward {r.rng.step + 1} of the module"), tensor_parts.plain():
            return self._forward(r, args, kwargs)

    def _forward(self, r: Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        r.checks.forward("module.forward", training=self.training)
        batch = inputs.from_call(r.program, inputs.arguments(r.model), args, kwargs)
        batch = inputs.prepared(r.program, batch, local=True)
        inputs.check_plain(batch)
        r.rng.training = self.training
        r.checks.batch(batch, local=True)
        tensors = inputs.take(r.program, batch, r.mesh, local=True)
        r.buckets.reset()
        program, stage, constants = r.evaluating(batch) if not self.training else (r.program, r.stage, {})
        r.updates.carry_out()
        r.buckets.update_aliases()
        stored = {"mesh": r.mesh, "rng": r.rng, **r.buckets.given, **self._buffers_by_name(), **constants}
        arguments = {**stored, **dict(zip((x.name for x in program.inputs), tensors, strict=True))}
        arguments = {name: arguments[name] for name in stage.takes}
        if torch.is_grad_enabled():
            loss, news = r.differentiable(stage, arguments)
        else:
            with op_errors.named(stage.graph):
                loss, news = stage.run(*arguments.values())
        r.updates.finish_gather()
        if self.training:
            r.rng.step += 1
            for b, new in zip((b for b in r.program.buffers if b.updated), news, strict=False):
                self._replace_buffer(b.name, new.detach().clone(memory_format=torch.contiguous_format))
        values = outputs.combined(program, r.mesh, self._outputs(program, news))
        return r.checks.returned(outputs.result(program, r.mesh, loss, values, gather=False))

    def _outputs(self, program: Program, news: Sequence[Tensor]) -> outputs.Parts:
        """Return the program's outputs, the last of the new values, by name; those that may alias are copied."""
        copied = outputs.views(program.stages[0])
        values = news[len(news) - len(program.outputs) :]
        return {
            o.name: {0: x.detach().clone() if o.name in copied else x.detach()}
            for o, x in zip(program.outputs, values, strict=True)
        }

    def optimizer(self, make: OptimizerOf | None = None) -> Optimizer:
        """Make an optimizer of this module's parameters from the function that an engine takes. Collective.

        make: params -> torch optimizer, or a list of them; default: the spec's, else AdamW(3e-4). params are (name,
        parameter) pairs (shardc.groups and shardc.matrices take them). With `optimizer: {matrices: ...}` in the spec
        they are whole matrices. Their owners step an optimizer that needs them whole: `step()` is then collective, too.
        Clip, schedule and save it as any other. Raises ShardcError for an optimizer that would train otherwise than on
        one device.
        """
        r = self._running
        with r.mesh.together("making an optimizer"):
            engine_options.check_trains(r.program)
            r.updates.carry_out()
            r.updates.finish_gather()
            offload = Offload(r.program.spec.data, r.mesh)
            optimizer, owners = engine_optimizer.create_optimizer(
                make or engine_optimizer.of_spec(r.program), r.program, r.buckets, r.mesh, offload
            )
        assert optimizer is not None, "a module has all parameters"
        r.updates.owners.add(owners)
        return owners.in_own_loop(optimizer, r.buckets.owned.values(), self._agree_on_step)

    def _agree_on_step(self, optimizer: Optimizer, written: bool) -> None:
        """Compare what ranks are about to step: a rank may own nothing of a group and never read its rate."""
        r = self._running
        r.updates.finish_gather()
        r.checks.owners_step(optimizer, written=written)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that the whole model's 2-norm is at most `max_norm`. After backward; collective.

        Returns the norm before, 0-dim, the same on every rank. torch.nn.utils.clip_grad_norm_ on `parameters()` would
        compute the norm of this rank's parts, another number on every rank. It is refused where parameters are split.
        """
        norm = self._running.norm
        norm.start()
        total = norm.total()
        norm.clip(max_norm, total)
        return total

    def local(self, batch: Any) -> Any:
        """Return this rank's part of a global batch, as `forward` takes it. See Program.local."""
        return inputs.local(self._running.program, batch, self._running.mesh.rank)

    def _replace_buffer(self, name: str, new: Tensor) -> None:
        # replaced, not overwritten: backward may still need the old value. The new value is a copy (above), as it may
        # alias a parameter or the batch
        b = next(b for b in self._running.program.buffers if b.name == name)
        for fqn in (b.fqn, *b.aliases):
            parent, last = parent_of(self, fqn)
            parent._buffers[last] = new

    def extra_repr(self) -> str:
        r = self._running
        return f"rank {r.mesh.rank} of {r.program.mesh}"


def _check_supported(program: Program) -> None:
    """Raise ShardcError for a program that only an engine, or `program.forward`, can run."""
    if program.forward_only:
        fault, fix = "the program is forward-only: there is no loss to train by", "use program.forward(model)"
        raise ShardcError(fault, where="program.module", fix=fix)
    if program.microbatches > 1:
        fault = f"a step of this program is {program.microbatches} microbatches, each with its own backward: a module "
        fault += "has one"
        fix = "use program.engine(...), or write microbatches: 1 and add gradients up in your own loop"
        raise ShardcError(fault, where="batch.microbatches", fix=fix)
    if program.axis:
        fault = f"this program is a pipeline over {program.axis}: its stages run forward and backward by a schedule"
        raise ShardcError(fault, where="pipeline", fix="use program.engine(...)")
    if program.spec.precision.loss_scale is not None:
        fault = "the engine scales the loss, and skips updates with gradients that are not finite: a module does not "
        fault += "step an optimizer, so nothing would be scaled"
        fix = "use program.engine(...); or leave loss_scale out, multiply the loss by a number before backward,"
        fix += " and divide each .grad by it"
        raise ShardcError(fault, where="precision.loss_scale", fix=fix)
    if program.spec.data.offload.used:
        fault = "offload needs an engine, which moves tensors around the optimizer's step: a module does not step the"
        fault += " optimizer"
        raise ShardcError(fault, where="data.offload", fix="use program.engine(...), or leave offload out")
