"""Define what a rank holds, and where an optimizer steps it: where it is stored, unless a feature says more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Part, Shards, copied, cut_axes, kept, replicas


class Owners:
    """Every rank steps what it stores, so that nothing moves. A feature's owners step whole parameters.

    moves: whether gradients go to owners. owned: what it steps as their owner, {name in checkpoints: parameter}.
    """

    moves = False
    owned: Mapping[str, nn.Parameter] = MappingProxyType({})

    @property
    def written(self) -> bool:
        """Whether user code wrote to stored parts of which owners have copies."""
        return False

    def note(self) -> None:
        """Note that the owners have the current values of the stored parts."""

    def gather(self) -> None:
        """Send the stored parts to the owners. Collective."""

    def forget(self) -> None:
        """Drop gradients of an earlier step, before a step."""

    def begin(self, names: Iterable[str]) -> None:
        """Start to send the final gradients of these parameters, while backward goes on. Collective."""

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context for the optimizer's step: gradients go to the owners, new values come back. Collective."""
        return nullcontext()

    def in_own_loop(
        self, optimizer: Optimizer, stored: Iterable[nn.Parameter], agree: Callable[[Optimizer, bool], None]
    ) -> Optimizer:
        """Return the optimizer for a custom loop.

        stored: the module's parameters. agree: compares the optimizer, and whether user code wrote to parameters,
        between ranks before a step.
        """
        return optimizer

    # --- in a checkpoint

    def groups(self, optimizer: Optimizer) -> list[dict[str, str] | None]:
        """Return {name in checkpoints: parameter's placeholder} of each group; None: it steps stored parts."""
        return [None] * len(optimizer.param_groups)


class OwnersOptimizer(Optimizer):
    """An optimizer for a custom loop whose step moves values to owners and back. made: as the user made it."""

    made: Optimizer
    owners: Owners


@dataclass(frozen=True)
class RankState:
    """What a rank holds of a program's training.

    params, buffers: by placeholder name; shards: flat shards (ZeRO) among params. optimizer: over these params. owners:
    where it steps them.
    """

    program: Program
    mesh: Any
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    shards: Shards = field(default_factory=dict)
    owners: Owners = field(default_factory=Owners)

    def parts(self, x: Param | Buffer, local: Tensor, *, whole: bool = False) -> dict[str, Part]:
        """Return the part of a global tensor that `local` is, by name in a checkpoint; for a stack, one per member.

        local: of x's local shape; whole: or a whole tensor, such as a count of steps, on every rank that has x.
        """
        program, coords, shard = self.program, self.mesh.layout.coords(self.mesh.rank), self.shards.get(x.name)
        cut = cut_axes(program, x) if shard is not None and isinstance(x, Param) else ()
        same = replicas(program, Layout() if whole else x.layout, cut)
        written = not copied(program, x, self.mesh) and not any(coords[a] for a in same)
        if whole:
            return dict.fromkeys(x.members or (x.fqn,), Part(local, tuple(local.shape), written=written))
        part = Part(local, x.shape, x.layout, shard, written)
        return {n: replace(part, member=i) for i, n in enumerate(x.members)} or {x.fqn: part}

    def model_parts(self) -> dict[str, Part]:
        """Return the parts of parameters and buffers, by their names in a checkpoint."""
        held = {**self.params, **self.buffers}
        stored: list[Param | Buffer] = [*self.program.params, *kept(self.program)]
        parts = (self.parts(x, held[x.name]) for x in stored if x.name in held)
        return {f"model.{n}": part for each in parts for n, part in each.items()}
