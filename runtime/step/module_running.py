"""Hold the state of a program's module other than parameters and buffers; begin and end backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime.checks import tensor_parts
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.checks.marks import Slices
from shardc.runtime.rng import Rng
from shardc.runtime.stage.clip_grad_norm import GradNorm, norm_axes
from shardc.runtime.stage.joint_function import JointCall, differentiable
from shardc.runtime.stage.runnable import RunnableStage, only_stage
from shardc.runtime.state.owners import Owners
from shardc.runtime.state.parts import constants
from shardc.runtime.state.saving import Saves
from shardc.runtime.step import batch_sizes
from shardc.runtime.zero.buckets import Buckets


class Running:
    """The state of a ShardedModule other than parameters and buffers. model: source of the weights.

    One attribute holds it, so that no name of the model can clash.
    """

    def __init__(self, program: Program, model: Any, mesh: Any, rng: Rng, buckets: Buckets, checks: CheckHooks) -> None:
        self.program, self.model, self.mesh, self.rng = program, model, mesh, rng
        self.buckets, self.checks, self.stage = buckets, checks, only_stage(program, mesh)
        self.updates, self.norm, self.saves = Updates(buckets), GradNorm(program, buckets.owned, mesh), Saves(mesh)
        self.slices = Slices(self)
        #: Parameters whose gradient is not final after the graph's backward, or is of a part.
        self.summed = sorted(buckets.names | {p.name for p in program.params if norm_axes(program, p.name)})
        #: Reads the module's buffers: a weak reference, because the module holds this object.
        self.read_buffers: Callable[[], Callable[[], dict[str, Tensor]] | None] = lambda: None
        self.eval: tuple[Program, RunnableStage, dict[str, Tensor]] | None = None
        self.waiting = weakref.WeakSet[JointCall]()  # for their backward

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """The parameters that optimizers work on."""
        return self.buckets.owned

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers: {placeholder name: buffer}."""
        read = self.read_buffers()
        return read() if read is not None else {}

    @property
    def written(self) -> bool:
        """Whether user code wrote to parameters."""
        return self.updates.written

    def evaluating(self, batch: Any) -> tuple[Program, RunnableStage, dict[str, Tensor]]:
        """Return what runs a forward in eval mode, and its extra constants: see step.batch_sizes."""
        if self.eval is None:
            program, lifted = self.program, dict[str, Tensor]()
            if not batch_sizes.step_can_evaluate(program, self.mesh):
                shapes = tuple(x.shape for x in program.inputs)
                program = batch_sizes.recompile(program, batch, shapes, self.mesh, use="evaluate")
                lifted = constants(program, self.mesh)
            same = program is self.program
            self.eval = program, self.stage if same else only_stage(program, self.mesh), lifted
        return self.eval

    def differentiable(self, stage: RunnableStage, values: Mapping[str, Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Run a forward whose loss has a backward: (loss, new values). values: the stage's inputs by name."""
        buckets = self.buckets
        call = JointCall(stage.joint, values, self)
        loss, news = call.forward()
        unsummed = [buckets.owned[name] for name in buckets.unsummed]
        summed = [p for name in self.summed if (p := buckets.owned[name]).requires_grad]
        result = differentiable(loss, call, *unsummed, *summed)
        if result.requires_grad:
            self.waiting.add(call)
            result.register_hook(self.updates.note)  # type: ignore[no-untyped-call]
        return result, news

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Prepare weights for sending: see shardc.features.reshard.runtime.End."""
        self.checks.call("moving weights")
        self.updates.carry_out()
        self.updates.finish_gather()
        self.buckets.update_aliases()
        yield

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Let this rank's stored parts be filled: other ranks get the copies that they need before a forward."""
        self.buckets.reset(forward=True)
        self.updates.finish_gather()
        self.buckets.update_aliases()
        yield
        self.updates.note()

    def finish_backward(self) -> None:
        """Finish the sums of gradients when autograd's backward has ended."""
        with tensor_parts.plain():
            self.buckets.finish()
            self.checks.gradients()


class Updates:
    """Tracks whether parameters may have changed since they were last gathered.

    They change by a backward and the step after it, by loading weights, or by user code, such as an average of weights.
    Use: `carry_out()` starts to gather, and `finish_gather()` ends it. Until then nobody else writes: at ZeRO 1 and 2
    the background gather writes to the parameters' memory when its bytes arrive.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets, self._noted, self._settled = buckets, False, True
        self._version = self.buckets.version()
        #: The owners of these parameters: a gather writes to them too, which is no change for the owners.
        self.owners: weakref.WeakSet[Owners] = weakref.WeakSet()
        self._same: list[Owners] = []

    @property
    def due(self) -> bool:
        """Whether parameters must be gathered before the next forward."""
        return self._noted or self.written

    @property
    def written(self) -> bool:
        """Whether user code wrote to parameters. Waits for a running gather, which writes to them too."""
        self.finish_gather()
        return self._version != self.buckets.version()

    def note(self, *_: Any) -> None:
        """Note that parameters may change from now on."""
        self._noted = True

    def carry_out(self) -> None:
        """Start to gather parameters that may have changed."""
        if self.due:
            self._same = [m for m in self.owners if not m.written]
            self.buckets.publish()
            self._noted = self._settled = False

    def finish_gather(self) -> None:
        """Wait for the gather that `carry_out` started."""
        if not self._settled:
            self.buckets.wait_for_gathers()
            self._settled, self._version = True, self.buckets.version()
            for m in self._same:
                m.note()
            self._same = []
