"""Suggest spec entries for a fused weight (q, k and v, or gate and up) that the spec splits as one.

spec         {qkv: column, o: row}: followed back from o, each third of qkv is split; `column` cuts across thirds
suggestion   "h.*.qkv.{weight,bias}": {0: {axis: tp, split: 3}}
"""

from __future__ import annotations

from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.passes.annotate import to_spec
from shardc.passes.annotate.propagate_split import Follower, SplitGroup
from shardc.spec.yaml_reader import flow


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
            agree |= {p.name for p, t in group.params.items() if splits.get(p.name) == t}  # they lead to the same group
            better |= {
                p.name: t
                for p, t in group.params.items()
                if p.name in splits and splits[p.name] != t and splits[p.name].dim == t.dim
            }
    rules = to_spec.entries(program, better, axis.partition(".")[0], {p.name for p in program.params} - better.keys())
    return ", ".join(f"{flow(r.pattern)}: {flow(r.to_plain())}" for r in rules)
