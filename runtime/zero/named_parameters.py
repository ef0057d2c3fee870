"""Define what users see of a rank's parameters: pairs in `optimizer(params)`, and `engine.params` by name.

At ZeRO 1 to 3 the user's function makes its optimizer from `stand_in`s: parameters of the whole local shapes with the
memory of one element, so it can group them by name or shape. Then the groups get this rank's flat shards of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import UnknownParameterError
from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.optimizer_check import has_param_shape

_LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)


class _Pair(tuple[str, nn.Parameter]):
    """One pair. Attributes of a parameter, such as .ndim, raise an error that explains it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"optimizer(params) gets (name, parameter) pairs, and a pair has no .{name}: write"
            " `for name, p in params`, and p is the parameter"
        )


class NamedParameters(list[tuple[str, nn.Parameter]]):
    """The (name, parameter) pairs for `optimizer=`: this rank's parts of the trained parameters.

    torch's optimizers, and all subclasses of torch.optim.Optimizer, accept such pairs in place of plain parameters.
    known: {name: all names of that parameter} of the whole model, also of those on other ranks: a tied weight has
    several. inner: the names of the matrices between tables and head (`inner_matrices`).
    """

    def __init__(
        self, pairs: Iterable[tuple[str, nn.Parameter]], known: Mapping[str, tuple[str, ...]], inner: Iterable[str] = ()
    ) -> None:
        super().__init__(map(_Pair, pairs))
        self.known, self.inner = dict(known), frozenset(inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("parameters", "named_parameters", "modules", "named_modules", "children"):
            raise AttributeError(
                f"optimizer(params) gets (name, parameter) pairs, not the model, so there is no .{name}(): torch's"
                " optimizers take them as they are, AdamW(params, lr=...); the parameters alone are"
                " [p for name, p in params]"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, program: Program, params: Mapping[str, nn.Parameter]) -> NamedParameters:
        """Build it from this rank's parameters, by placeholder name."""
        trained = [p for p in program.params if p.requires_grad]
        known = {p.fqn: (p.fqn, *p.names) for p in trained}
        matrices = inner_matrices(program)
        inner = [p.fqn for p in trained if p.name in matrices]
        return cls([(p.fqn, params[p.name]) for p in trained if p.name in params], known, inner)


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
        fix = "write into it: with torch.no_grad(): engine.params[name].copy_(value)"
        raise ShardcError("an engine's parameters cannot be replaced", where=f"engine.params[{name!r}] = ...", fix=fix)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._others.get(name, default))


def inner_matrices(program: Program) -> frozenset[str]:
    """Return the placeholder names of parameters for optimizers over matrices.

    They have two dims or more and are neither a lookup table nor the head (Jordan et al. 2024, "Muon"). A parameter
    counts as the head if no other such parameter is used after it.
    """
    wide = {p.name for p in program.params if len(p.shape) - bool(p.members) > 1}
    bits = {name: 1 << i for i, name in enumerate(sorted(wide))}
    bit_of: dict[fx.Node, int] = {}  # the bit of each parameter, and of values computed from it alone
    taken: dict[str, list[fx.Node]] = {name: [] for name in wide}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            bit_of[node] = bits.get(node.name, 0)
        elif len(node.all_input_nodes) == 1:  # a cast, a view
            bit_of[node] = bit_of.get(node.all_input_nodes[0], 0)
    # for each op: the bits that it or any later op takes (`.get`: users may be outside of a proof's graph)
    behind: dict[fx.Node, int] = {}
    for node in reversed(program.graph.nodes):
        taken_bits = [bit_of.get(x, 0) for x in node.all_input_nodes] if not bit_of.get(node) else []
        behind[node] = functools.reduce(operator.or_, [*taken_bits, *(behind.get(user, 0) for user in node.users)], 0)
        for name in (n for n, bit in bits.items() if bit in taken_bits):
            taken[name].append(node)
    names = set()
    for name, users in taken.items():
        others = functools.reduce(operator.or_, (behind[user] for user in users), 0) & ~bits[name]
        if others and not any(user.target in _LOOKUPS for user in users):
            names.add(name)
    return frozenset(names)


def stand_in(shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
    """Return a read-only parameter with the memory of one element. like: has its device and dtype."""
    return nn.Parameter(
        torch.zeros((), dtype=like.dtype, device=like.device).expand(shape), requires_grad=like.requires_grad
    )


def replace_stand_ins(
    optimizer: Optimizer,
    stand_ins: Mapping[str, nn.Parameter],
    owned: Mapping[str, nn.Parameter],
    shards: Mapping[str, FlatShard],
) -> None:
    """Replace `stand_ins` by this rank's flat shards, in the optimizer's groups and in existing state."""
    name_of = {id(stand_ins[n]): n for n in shards}
    for group in optimizer.param_groups:
        # in place: others may hold the list
        group["params"][:] = [owned[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]]
    for p in [p for p in optimizer.state if id(p) in name_of]:
        name = name_of[id(p)]
        shard, state = shards[name], optimizer.state.pop(p)
        cut = {k: x.reshape(-1)[shard.start : shard.stop].clone() for k, x in state.items() if has_param_shape(k, x, p)}
        optimizer.state[owned[name]] = {**state, **cut}
