"""Print a program as Python that a person can read, and that runs as it stands.

    # h.0.proj (gpt.py:31): x = x + self.proj(y)
    proj = aten.linear.default(y, h_0_proj_weight, None)  # f32[8, 16, 64] +tp ~dp grad
    proj_sum = ops.all_reduce(proj, mesh, ('tp',), tag='proj_sum')  # f32[8, 16, 64] grad | all_reduce/none tp 32768 "spec.yaml:9:3 '*.proj': row"
    del proj, y

A line is one op; its comment is the type of the result (shardc.placement.show), `grad` where a gradient flows, and for collectives what
runs forward/backward, the axes, bytes per rank and cause (`unasked` before it if no annotation asked for it). `shardc.parse` reads it back:
the text is the artifact, not a picture of it.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shardc.placement import show
from shardc.program import Bucket, Collective, Param, Program, Source, Value

HEADER = '''import torch

from shardc.runtime import ops

aten = torch.ops.aten
'''


def function(graph: fx.Graph, program: Program, name: str = "forward") -> str:
    """One graph as the text of a Python function."""
    about = {x.name: x for x in program.stored}
    lines = [f"def {name}("]
    for node in graph.nodes:
        if node.op == "placeholder":
            x = about.get(node.name)
            what = "" if x is None else getattr(x, "fqn", "") or "input " + ".".join(map(str, getattr(x, "path", ()))) if x else ""
            kind = f"  # {value_text(node.meta['value'])}  {what}".rstrip() if x is not None else ""
            lines.append(f"    {node.name},{kind}")
    lines.append("):")
    last = _last_uses(graph)
    said = Source()
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {_arg(node.args[0])}")
        elif node.op == "call_function":
            source = node.meta.get("source", Source())
            if source != said:
                lines.append(f"    # {source_text(source)}".rstrip())
                said = source
            lines.append(f"    {node.name} = {_call(node)}  # {comment(node)}")
            if node in last:
                lines.append(f"    del {', '.join(last[node])}")
    return "\n".join(lines) + "\n"


def module(graph: fx.Graph, program: Program, doc: str) -> str:
    """One graph as the text of a Python file."""
    return f'"""{doc}"""\n\n{HEADER}\n\n{function(graph, program)}'


def text(program: Program) -> str:
    """The whole program: what it is, how everything is stored, what is reduced, and what every rank runs."""
    lines = [*_head(program), ""]
    if program.stages:
        for stage in program.stages:
            lines += [f"# {stage.name}: what every rank runs", function(stage.graph, program, stage.name)]
    else:
        lines += ["# the model as one device runs it", function(program.graph, program, "single")]
    return "\n".join(lines)


def _head(program: Program) -> Iterator[str]:
    mesh = program.mesh
    yield f"# {program.meta.get('model', 'program')} on {mesh}: {mesh.world} rank{'s' if mesh.world != 1 else ''}, {len(program.stages)} stage"
    whole = sum(p.value.nbytes() for p in program.params)
    mine = sum(p.value.nbytes(mesh) for p in program.params)
    count = sum(math.prod(p.shape) for p in program.params)
    yield f"# {len(program.params)} parameters, {count:,} numbers, {human(whole)}; {human(mine)} a rank"
    yield from (f"# note: {n}" for n in program.notes)
    yield "# parameters: name, type, axes its gradient is summed over, bucket"
    for p in program.params:
        yield f"#   {param_text(p)}"
    for i, b in enumerate(program.buckets):
        yield f"# bucket {i}: {bucket_text(b, program)}"


def param_text(p: Param) -> str:
    names = " = ".join((p.fqn, *p.aliases))
    reduced = f"  sum over {'+'.join(p.reduce)}, bucket {p.bucket}" if p.reduce else ""
    return f"{names}  {show(p.shape, p.dtype, p.layout)}{reduced}{'' if p.requires_grad else '  frozen'}"


def bucket_text(b: Bucket, program: Program) -> str:
    size = sum(program.param(n).value.nbytes(program.mesh) for n in b.params)
    return f"all_reduce over {'+'.join(b.axes)} of {len(b.params)} gradients, {human(size)}, from {b.params[0]} to {b.params[-1]}"


def human(nbytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


# --- one line ---------------------------------------------------------------------------------------------------------


def source_text(source: Source) -> str:
    """`module (file.py:31): code`."""
    code = source.code.replace("\n", " ").strip()
    return f"{source.module or '·'} ({source.line})" + (f": {code}" if code else "")


def value_text(value: Value | tuple[Value, ...] | None) -> str:
    """The type of a result, as `show` prints it; `?` for an op that gives nothing (asserts, before canonical)."""
    if value is None:
        return "?"
    vs = value if isinstance(value, tuple) else (value,)
    one = " ; ".join(str(v) + (" grad" if v.requires_grad else "") for v in vs)
    return f"({one})" if isinstance(value, tuple) else one


def comment(node: fx.Node) -> str:
    found: Collective | None = node.meta.get("collective")
    typed = value_text(node.meta["value"])
    return typed if found is None else f"{typed} | {collective_text(found)}"


def collective_text(c: Collective) -> str:
    return f"{c.kind}/{c.backward} {'+'.join(c.axes)} {c.bytes} {'' if c.asked else 'unasked '}{json.dumps(c.cause, ensure_ascii=False)}"


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_arg(node.args[0])}[{node.args[1]!r}]"
    args = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(args)})"


def target_text(target: Any) -> str:
    """`aten.add.Tensor`, `torch.ops.lib.op.default`, `ops.all_reduce`."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name if name.startswith("aten.") else f"torch.ops.{name}"
    return f"ops.{target.__name__}"


def _arg(a: Any) -> str:
    if isinstance(a, fx.Node):
        return a.name
    if isinstance(a, tuple):
        return f"({', '.join(map(_arg, a))}{',' if len(a) == 1 else ''})"
    if isinstance(a, list):
        return f"[{', '.join(map(_arg, a))}]"
    if isinstance(a, float) and not math.isfinite(a):
        return f"float('{a}')"
    if a is None or isinstance(a, (bool, int, float, str, torch.dtype)):
        return repr(a)
    if isinstance(a, (torch.device, torch.layout, torch.memory_format)):  # only before canonical: `shardc.parse` refuses them
        return repr(a)
    raise TypeError(f"{a!r} of type {type(a).__name__} cannot stand in a program")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """Op -> the values that nothing after it reads: deleting them there keeps memory as eager code would."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    gone: dict[fx.Node, list[str]] = {}
    for used, at in last.items():
        if used.op == "call_function" and at.op != "output":
            gone.setdefault(at, []).append(used.name)
    return gone
