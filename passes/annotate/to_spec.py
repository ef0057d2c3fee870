"""Write splits as spec entries as a user would: patterns with a style word, or with dims.

    model.layers.0.self_attn.q_proj.weight: dim 0, ..., model.layers.7.self_attn.v_proj.weight: dim 0
    "model.layers.*.self_attn.{q_proj,k_proj,v_proj}": column

Every pattern is checked against all names of the model: it means exactly these splits for everything that it matches.
`entries` writes a plan; `suggest_split` entries for fused weights (q, k and v, or gate and up) that are split as one:

    spec         {qkv: column, o: row}: followed back from o, each third of qkv is split; `column` cuts across thirds
    suggestion   "h.*.qkv.{weight,bias}": {0: {axis: tp, split: 3}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.ir.graph import placeholders
from shardc.ir.patterns import match, names_weight, siblings
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.layer_names import of_every_layer, of_every_outer_layer
from shardc.passes.annotate.propagate_split import Follower, SplitGroup
from shardc.passes.annotate.weight_roles import ROLES, dim_by_roles, role_of, roles_of
from shardc.rules.core.choices import Choices
from shardc.spec import DimShard, ShardRule, Style
from shardc.spec.yaml_reader import flow


@dataclass(frozen=True)
class _Entry:
    """One name (a module with a style word, or a parameter with a shard) and its parameters."""

    name: str
    style: Style | None
    shard: Shard | None
    params: tuple[Param, ...]


def entries(program: Program, splits: Mapping[str, Shard], axis: str, named: Iterable[str]) -> tuple[ShardRule, ...]:
    """Return the entries that mean these splits over the axis: {parameter's name: shard}; others are whole.

    named: parameters of earlier entries.
    """
    done = set(named)
    words = _StyleWords()
    nodes = placeholders(program.graph)
    free = [p for p in program.params if p.name not in done]
    groups: dict[tuple[str, Style | None, Shard | None], list[_Entry]] = {}
    for entry in _modules_or_params(free, splits, nodes, words):
        groups.setdefault((of_every_layer(entry.name), entry.style, entry.shard), []).append(entry)
    patterns: list[tuple[str, Style | None, Shard | None]] = []
    for (pattern, style, shard), members in groups.items():
        outer = dict.fromkeys(of_every_outer_layer(e.name) for e in members)  # Sequentials of layers: "blocks.*.0"
        for names in ([pattern], outer, [e.name for e in members]):  # the shortest that is right for all parameters
            if all(_fits(n, style, shard, p, splits.get(p.name), nodes[p.name], words) for n in names for p in free):
                patterns += [(n, style, shard) for n in names]
                break
    merged: dict[tuple[str, Style | None, Shard | None], list[str]] = {}
    for pattern, style, shard in patterns:
        parent, _, last = pattern.rpartition(".")
        merged.setdefault((parent, style, shard), []).append(last)
    return tuple(_rule(parent, lasts, style, shard, axis) for (parent, style, shard), lasts in merged.items())


def suggest_split(program: Program, axis: str) -> str:
    """Return entries that split weights over an axis as the other split weights need it, or "".

    Only weights that the spec splits in another way have an entry. program: annotated. axis: or a digit of one.
    """
    splits = {p.name: s for p in program.params if isinstance(s := p.layout[axis], Shard)}
    follower, better, agree = Follower(program), dict[str, Shard](), set[str]()
    for name, s in splits.items():
        if name in agree:
            continue
        group = follower.follow((follower.placeholders[name], 0), s)
        if isinstance(group, SplitGroup):
            split = {p.name: t for p, t in group.params.items() if p.name in splits}
            agree |= {other for other, t in split.items() if splits[other] == t}  # they lead to the same group
            better |= {other: t for other, t in split.items() if splits[other] != t and splits[other].dim == t.dim}
    rules = entries(program, better, axis.partition(".")[0], {p.name for p in program.params} - better.keys())
    return ", ".join(f"{flow(r.pattern)}: {flow(r.to_plain())}" for r in rules)


def _modules_or_params(
    params: list[Param], splits: Mapping[str, Shard], nodes: Mapping[str, fx.Node], words: _StyleWords
) -> Iterable[_Entry]:
    """Yield a module for all its parameters if a style word fits, else each parameter separately."""
    modules: dict[str, list[Param]] = {}
    for p in params:
        modules.setdefault(p.fqn.rpartition(".")[0], []).append(p)
    for module, members in modules.items():
        split = [p for p in members if p.name in splits]
        if not split:
            continue
        styles: list[Style] = ["vocab", "column", "row"]
        fit = (w for w in styles if all(words.mean(w, splits.get(p.name), nodes[p.name], module) for p in members))
        style = next((w for w in fit if any(words.usual(w, nodes[p.name], splits[p.name].dim) for p in split)), None)
        if style and module:
            yield _Entry(module, style, None, tuple(members))
        else:
            yield from (_Entry(p.fqn, None, splits[p.name], (p,)) for p in split)


class _StyleWords:
    """The meanings of style words for a program's parameters. Caches roles."""

    def __init__(self) -> None:
        self._roles: dict[tuple[fx.Node, str], list[str]] = {}
        self._known: dict[Any, Choices] = {}

    def mean(self, style: Style, wanted: Shard | None, node: fx.Node, module: str) -> bool:
        """Return whether a word for a module means exactly this split of a parameter (None: whole)."""
        if (node, module) not in self._roles:
            self._roles[node, module] = roles_of(node, module, self._known)
        dim = dim_by_roles(node, style, self._roles[node, module])
        return dim == -1 if wanted is None else wanted == Shard(wanted.dim) and dim == wanted.dim

    def usual(self, style: Style, node: fx.Node, dim: int) -> bool:
        """Return whether the split is the word's first meaning: `vocab` is for tables that are looked up."""
        return role_of(node, dim, known=self._known) in ROLES[style][:1]


def _fits(
    pattern: str,
    style: Style | None,
    shard: Shard | None,
    p: Param,
    wanted: Shard | None,
    node: fx.Node,
    words: _StyleWords,
) -> bool:
    """Return whether a pattern is right for one parameter: it does not match, or means the wanted split."""
    for name in (p.fqn, *p.names):
        module = name.rpartition(".")[0]
        if style is not None and names_weight(pattern, name) and not words.mean(style, wanted, node, module):
            return False
        if style is None and (match(pattern, module) or (match(pattern, name) and shard != wanted)):
            return False
    return True


def _rule(parent: str, lasts: list[str], style: Style | None, shard: Shard | None, axis: str) -> ShardRule:
    pattern = siblings(parent, lasts)
    if shard is None:
        return ShardRule(pattern, style, axis)
    return ShardRule(
        pattern, None, axis, {shard.dim: (DimShard(axis=axis, split=shard.split, sections=shard.sections),)}
    )
