"""Make `ParameterPart`s of parameters of which ranks have parts (shardc.runtime.checks.tensor_parts).

Of a module at once; of an engine when somebody reads them. torch.distributed.checkpoint takes a plain tensor for the
whole one, the same on all ranks, and writes one of them. It first calls a method of the tensor: parts refuse there, as
parameters, in a state_dict and in an optimizer's.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Param, UnknownParameterError
from shardc.runtime.checks import tensor_parts
from shardc.runtime.checks.tensor_parts import Origin
from shardc.runtime.stage.clip_grad_norm import norm_axes


def watch_parameters(program: Program, params: Mapping[str, nn.Parameter], shards: Collection[str]) -> None:
    """Make `ParameterPart`s of split parameters. params: by placeholder name; shards: those that are flat shards."""
    for x, p, dims in _split(program, params, shards):
        if type(p) is nn.Parameter:  # not a tensor of tensors, such as a quantised weight
            tensor_parts.make_part(p, dims, Origin(x.fqn, tuple(x.shape), grad=False))


def mark_gradients(program: Program, params: Mapping[str, nn.Parameter], shards: Collection[str]) -> None:
    """Make the gradients of split parameters `TensorPart`s. params, shards: see `watch_parameters`."""
    for x, p, dims in _split(program, params, shards):
        if p.grad is not None and type(p.grad) is Tensor:
            p.grad = tensor_parts.part(p.grad, dims, Origin(x.fqn))


def _split(
    program: Program, params: Mapping[str, nn.Parameter], shards: Collection[str]
) -> Iterator[tuple[Param, nn.Parameter, frozenset[int] | None]]:
    """Yield parameters of which ranks hold different parts, with the split dims; None: a flat shard."""
    for x in program.params:
        if x.name in params and norm_axes(program, x.name):
            split_dims = frozenset(s.dim for a, s in x.layout.shards() if program.mesh.size(a) > 1)
            yield x, params[x.name], None if x.name in shards else split_dims


def refuse_checkpoint(x: Tensor, fqn: str) -> None:
    """Make torch.distributed.checkpoint refuse this part of a plain tensor (state, a buffer)."""
    if not isinstance(x, tensor_parts.TensorPart):
        x.__create_write_items__ = functools.partial(_write_items, fqn)  # type: ignore[attr-defined]
        x.__create_chunk_list__ = functools.partial(_write_items, fqn)  # type: ignore[attr-defined]
        x.__getstate__ = _no_state  # type: ignore[method-assign]


def _write_items(fqn: str, *_: Any) -> NoReturn:
    tensor_parts.refuse_checkpoint_of(fqn)


def _no_state() -> None:
    """Return no state, so that torch.save writes a plain tensor."""


class ByName(dict[str, nn.Parameter]):
    """A rank's parameters by the model's names, each once.

    Look-up also works by other names of a tied parameter, and by the program's placeholder names.
    """

    def __init__(self, program: Program, owned: Mapping[str, nn.Parameter]) -> None:
        params = [p for p in program.params if p.name in owned]
        super().__init__((p.fqn, owned[p.name]) for p in params)
        self._others = {name: owned[p.name] for p in params for name in (p.name, *p.aliases)}
        self._names = [n for p in program.params for n in p.names]
        self._elsewhere = {n: p.stages for p in program.params for n in (p.fqn, *p.aliases) if p.stages}

    def __missing__(self, name: str) -> nn.Parameter:
        if name not in self._others and name in self._elsewhere:
            where = " and ".join(map(str, self._elsewhere[name]))
            raise KeyError(f"{name}: only ranks of stage {where} have it; test with `in` first")
        if name not in self._others:
            raise UnknownParameterError.of(name, self._names, f"engine.params[{name!r}]")
        return self._others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others

    def __setitem__(self, name: str, value: object) -> None:
        raise ShardcError(
            "an engine's parameters cannot be replaced",
            where=f"engine.params[{name!r}] = ...",
            fix="write into it: with torch.no_grad(): engine.params[name].copy_(value)",
        )

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._others.get(name, default))
