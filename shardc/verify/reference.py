"""Run a global graph on one device: the reference that every sharded program is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from shardc.ir.program import Program


def interpret(
    program: Program,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    rng: Any = None,
    graph: fx.Graph | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Run `graph` (default: the program's global graph) with global tensors, without a mesh.

    params, buffers, inputs: tensors by placeholder name or FQN; lifted constants need none.
    rng: a shardc.runtime.rng.Rng; needed by graphs with dropout or BatchNorm only.
    Returns (loss, {name of an updated buffer: its new value}, {name of an output: its value}); differentiable.
    """
    weights = [params[p.name] if p.name in params else p.whole(params) for p in program.params]
    stored = [_find(buffers, b.name, b.fqn, *b.aliases) if b.constant is None else b.constant for b in program.buffers]
    batch = [_find(inputs, i.name) for i in program.inputs]
    loss, values = fx.GraphModule(nn.Module(), graph or program.graph)(None, rng, *weights, *stored, *batch)
    updated = [b.name for b in program.buffers if b.updated]
    outputs = dict(zip((o.name for o in program.outputs), values[len(updated) :], strict=True))
    return loss, dict(zip(updated, values, strict=False)), outputs


def _find(tensors: Mapping[str, Tensor], *names: str) -> Tensor:
    if name := next((name for name in names if name in tensors), None):
        return tensors[name]
    raise KeyError(f"no tensor for {names[0]!r}")


def reach(batch: Any, path: tuple[str | int, ...]) -> Any:
    """Return the leaf of a nested batch at `path`."""
    if not path and isinstance(batch, Mapping):
        return batch[None]  # a tensor with choices beside it
    for key in path:
        batch = getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]
    return batch
