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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run `graph` (default: the program's global graph) with global tensors, without a mesh.

    params, buffers, inputs: tensors by placeholder name or FQN (see `tensors_of`); lifted constants need none.
    rng: a shardc.runtime.rng.Rng; needed by graphs with dropout or BatchNorm only.
    Returns (loss, {name of an updated buffer: its new value}); differentiable.
    """
    return interpret_all(program, params, buffers, inputs, rng, graph)[:2]


def interpret_all(
    program: Program,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    rng: Any = None,
    graph: fx.Graph | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """As `interpret`; returns {name of an output: its value} as well."""
    arguments: list[Any] = [None, rng]
    arguments += [params[p.name] if p.name in params else p.whole(params) for p in program.params]
    arguments += [
        b.constant if b.constant is not None else _find(buffers, b.name, b.fqn, *b.aliases) for b in program.buffers
    ]
    arguments += [_find(inputs, i.name) for i in program.inputs]
    loss, news = fx.GraphModule(nn.Module(), graph or program.graph)(*arguments)
    updated = [b.name for b in program.buffers if b.updated]
    outputs = dict(zip((o.name for o in program.outputs), news[len(updated) :], strict=True))
    return loss, dict(zip(updated, news, strict=False)), outputs


def _find(tensors: Mapping[str, Tensor], *names: str) -> Tensor:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise KeyError(f"no tensor for {names[0]!r}")


def tensors_of(
    program: Program, model: nn.Module, batch: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(params, buffers, inputs) by placeholder name: the model's own tensors, not copies, and the batch's."""
    params, buffers = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
    )
    return (
        {p.name: p.whole(params) for p in program.params},
        {b.name: buffers[b.fqn] for b in program.buffers if b.constant is None},
        {i.name: reach(batch, i.path) for i in program.inputs},
    )


def reach(batch: Any, path: tuple[str | int, ...]) -> Any:
    """The leaf of a nested batch at `path`."""
    for key in path:
        batch = getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]
    return batch
