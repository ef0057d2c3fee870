"""What to write instead where the spec splits a fused weight as one, though the model takes its parts apart: q, k and
v,
or gate and up.

qkv: column, o: row        o's columns lead back to each third of qkv (`follow`), which `column` cuts across
"h.*.qkv.{weight,bias}": {0: {axis: tp, split: 3}}
"""

from __future__ import annotations

from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.passes.annotate import to_spec
from shardc.passes.annotate.propagate_split import Follower, SplitGroup
from shardc.spec.yaml_reader import flow


def suggest_split(program: Program, axis: str) -> str:
    """The entries that split over an axis what other split weights lead to as they need it, where the spec's split it
    otherwise; "" if none.

    program: annotated. axis: of the mesh, or a digit of one.
    """
    lies = {p.name: s for p in program.params if isinstance(s := p.layout[axis], Shard)}
    follower, better, agree = Follower(program), dict[str, Shard](), set[str]()
    for name, s in lies.items():
        if name in agree:
            continue
        group = follower.follow((follower.placeholders[name], 0), s)
        if isinstance(group, SplitGroup):
            agree |= {
                p.name for p, t in group.params.items() if lies.get(p.name) == t
            }  # from them the same group would be found
            better |= {
                p.name: t
                for p, t in group.params.items()
                if p.name in lies and lies[p.name] != t and lies[p.name].dim == t.dim
            }
    rules = to_spec.entries(program, better, axis.partition(".")[0], {p.name for p in program.params} - better.keys())
    return ", ".join(f"{flow(r.pattern)}: {flow(r.to_plain())}" for r in rules)
