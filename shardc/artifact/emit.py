"""Print a program as Python that a person can read, and that runs as it is.

    # h.0.proj (gpt.py:31): x = x + self.proj(y)
    proj = aten.linear.default(y, h_0_proj_weight, None)  # f32[8, 16, 64] +tp ~dp grad
    proj_sum = ops.all_reduce(proj, mesh, ('tp',), tag='proj_sum')  # f32[8, 16, 64] grad | all_reduce/none tp 32768
                                                                    "spec.yaml:9:3 '*.proj': row" (on the same line)
    del proj, y

A line is one op. Its comment is the type of the result (shardc.ir.type_text.show), `grad` if a gradient flows, and for
a collective what runs forward/backward, the axes, bytes per rank and cause (`implicit` before it if no annotation
implies it). Before that is the region of values that backward recomputes, and `kept` with those that it keeps. Lines
that are compiled as one have `| fused 3`; those that begin a copy to the host or back have its bytes and cause:
`| copy 32768 "spec.yaml:9:5 checkpoint 'h.*'"`. `shardc.artifact.parser` reads it back: the text is the artifact.
"""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.artifact.repeated_layers import Fold
from shardc.errors import ShardcError
from shardc.ir.graph import source_of
from shardc.ir.metadata import Collective, Value
from shardc.ir.outputs import Output
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stage import Edge, Pair, Region
from shardc.ir.stored import Bucket, Buffer, Input, Param
from shardc.ir.type_text import show
from shardc.ir.units import plural, size
from shardc.layer_names import note_lines
from shardc.runtime import ops
from shardc.torch_private import OpOverload

HEADER = """import torch

from shardc.runtime import ops

aten = torch.ops.aten
"""
#: Names that the text itself uses; fx avoids Python's keywords and builtins, and `torch`.
RESERVED = {"ops", "aten"}
#: Ops of backward graphs that have an effect, and no result.
EFFECTS = {ops.launch, ops.accumulate, ops.scatter}
#: In place of a type, for a value that is no tensor.
NO_TENSOR = "?"


def function(graph: fx.Graph, program: Program, name: str = "forward", fold: Fold | None = None) -> str:
    """Return a graph as the text of a Python function. fold: leaves out nodes; None: all are shown.

    Raises ShardcError if a name of the model hides one of the text, TypeError for an argument without a written form.
    """
    about, fold = {x.name: x for x in program.stored}, fold or Fold(program, full=True)
    lines = [f"def {name}("]
    for node in fold.nodes(graph, "placeholder"):
        if isinstance(node, str):
            lines.append(f"    # {node}")
            continue
        x, value = about.get(node.name), node.meta.get("value")
        if node.name in RESERVED:
            fault = f"{node.name!r} cannot be the name of a parameter, buffer or input"
            fix = "rename it in the model: programs call their ops by that name"
            raise ShardcError(fault, where=what_is(x) if x else "", fix=fix)
        kind = f"  # {value_text(value)}  {what_is(x)}".rstrip() if x is not None else ""
        if "collective" in node.meta:  # a value of another stage
            lines.append(f"    # {source_text(source_of(node))}")
            kind = f"  # {comment(node)}"
        elif x is None and "value" in node.meta and node.name not in ("mesh", "rng"):  # of a stage's backward
            kind = f"  # {value_text(value)}"
        lines.append(f"    {node.name},{kind}")
    lines.append("):")
    last = last_uses(graph)
    header, header_source = source_text(Source()), (Source(), "")
    for node in fold.nodes(graph, "call_function"):
        if isinstance(node, str):
            lines.append(f"    # {node}")
            continue
        source, prefix = source_of(node), _of(node)
        if (source, prefix) != header_source:
            header_source = source, prefix
            if (now := prefix + source_text(source)) != header:  # two sources may read the same
                header = now
                lines.append(f"    # {header}")
        if node.target in EFFECTS:
            sent = f"  # {collective_text(node.meta['collective'])}" if "collective" in node.meta else ""
            lines.append(f"    {_call(node)}{sent}")
        else:
            lines.append(f"    {node.name} = {_call(node)}  # {comment(node)}")
        gone = [n.name for n in last[node] if n.op == "call_function" and (n is not node or n.target not in EFFECTS)]
        if gone:
            lines.append(f"    del {', '.join(gone)}")
    return "\n".join([*lines, f"    return {_arg(graph.output_node().args[0])}"]) + "\n"


def _of(node: fx.Node) -> str:
    """Return the forward op that a line of backward belongs to or runs again, as the start of its comment."""
    if "of" not in node.meta:
        return ""
    return f"{node.meta['of']} {'again' if node.meta.get('repeats') else 'backward'}, "


def what_is(x: Param | Buffer | Input) -> str:
    """Return a placeholder's name in the model, or its place in the batch."""
    if isinstance(x, Input):
        return plain(f"input {'.'.join(map(str, x.path))}").rstrip()
    return plain(x.fqn) or "constant"


def module(graph: fx.Graph, program: Program, doc: str) -> str:
    """Return a graph as the text of a Python file."""
    return f'"""{doc}"""\n\n{HEADER}\n\n{function(graph, program)}'


def graphs(program: Program) -> Iterator[tuple[str, fx.Graph, str, tuple[int, ...]]]:
    """Yield every graph with its name, its description, and its stages if a training step runs it."""
    yield "single", program.graph, "the model as one device runs it", ()
    if program.prologue is not None:
        counts = f"what every rank adds up over the {program.microbatches} microbatches first"
        yield "counts", program.prologue.graph, f"counts: {counts}", ()
    for i, s in enumerate(program.stages):
        yield f"stage{i}", s.graph, f"{s.name}: what {who(program, i)} runs", ()
        for way, graph in s.joint.graphs.items() if s.joint is not None else ():
            what = f"{s.name}, {way}: what {who(program, i)} runs; types are those of one rank"
            yield f"stage{i}_{way}", graph, what, (i,)
    for p in program.pairs:
        first, then = (program.stages[i].name for i in (p.first, p.then))
        what = f"forward of {first} beside {SECOND[p.kind]} of {then}, of another microbatch"
        yield pair_name(p), p.graph, what, (p.first, p.then)


def joint(program: Program, stage: int | None = None) -> str:
    """Return the forward and backward texts of all joint stages, or of one."""
    selected = (each for each in graphs(program) if each[3] and (stage is None or stage in each[3]))
    return "\n".join(f"# {what}\n{function(graph, program, name)}" for name, graph, what, _ in selected)


#: What runs beside a forward, by kind of pair.
SECOND = {"FB": "backward", "FF": "forward"}


def pair_name(p: Pair) -> str:
    """Return the name of the function of an overlapped pair, and of its file."""
    return f"{'pair' if p.kind == 'FB' else 'forwards'}_{p.first}_{p.then}"


def text(program: Program, *, full: bool = False) -> str:
    """Return the whole program as text. Equal layers are shown once, unless `full`."""
    fold = Fold(program, full=full)
    lines = [*_head(program, fold), ""]
    if not program.stages:
        lines += ["# the model as one device runs it", function(program.graph, program, "single", fold)]
    elif program.prologue is not None:
        lines += [f"# counts: what every rank adds up over the {program.microbatches} microbatches first"]
        lines += [function(program.prologue.graph, program, program.prologue.name)]
    often = f", {program.microbatches} times a step" if program.microbatches > 1 else ""
    for x in fold.stages():
        if isinstance(x, str):
            lines.append(f"# {x}\n")
        else:
            lines.append(f"# {x[1].name}: what {who(program, x[0])} runs{often}")
            lines.append(function(x[1].graph, program, x[1].name, fold))
    return "\n".join(lines)


def who(program: Program, stage: int) -> str:
    """Return the ranks that run a stage, in words."""
    s = program.schedule
    return "every rank" if s is None else f"every rank with {program.axis}={s.placement[stage]}"


def _head(program: Program, fold: Fold) -> Iterator[str]:
    mesh = program.mesh
    stages = f", {plural(len(program.stages), 'stage')}" if program.stages else ""
    yield f"# {program.meta.get('model', 'program')} on {mesh}: {plural(mesh.world, 'rank')}{stages}"
    total = sum(p.value.nbytes() for p in program.params)
    per_rank = f"{size(program.parameter_bytes())} {'on the rank with most' if program.axis else 'a rank'}"
    count = sum(math.prod(p.shape) for p in program.params)
    yield f"# {plural(len(program.params), 'parameter')}, {count:,} numbers, {size(total)}; {per_rank}"
    yield from (f"# {line}" for line in note_lines(map(plain, program.notes)))
    if program.meta.get("shard"):
        yield "# shard: what `use` came to, as entries of a spec"
        yield from (f"# {plain(line)}" for line in program.meta["shard"])
    yield from _offload(program)
    yield "# parameters: name, type, axes its gradient is summed over, bucket"
    yield from (f"#   {p if isinstance(p, str) else param_text(p)}" for p in fold.params())
    if program.buffers:
        yield "# buffers: name, type"
        yield from (f"#   {buffer_text(b)}" for b in program.buffers)
    yield "# inputs: place in the batch, type"
    yield from (f"#   {what_is(i)}  {i.value}" for i in program.inputs)
    if program.outputs:
        yield f"# outputs{'' if program.forward_only else ' beside the loss'}: name, type"
        yield from (f"#   {output_text(o, program)}" for o in program.outputs)
    for r in fold.regions():
        yield f"# {r if isinstance(r, str) else f'region {plain(r.name)}: {region_head(r)}'}"
    for b in fold.buckets():
        yield f"# {b if isinstance(b, str) else f'bucket {b[0]}: {bucket_text(b[1], program)}'}"
    for e in fold.edges():
        yield f"# {e if isinstance(e, str) else edge_text(e, program)}"


def _offload(program: Program) -> Iterator[str]:
    names = {"optimizer": "optimizer state", "parameters": "parameters' parts"}
    used = program.spec.data.offload.used if program.spec else {}
    places = {kind: "on the cpu" if place == "cpu" else f"in files of {plain(place)}" for kind, place in used.items()}
    if places:
        yield f"# offload: {'; '.join(f'{names[kind]} {place}' for kind, place in places.items())}"


def param_text(p: Param) -> str:
    names = plain(" = ".join((p.fqn, *p.aliases)))
    summed = f"sum over {'+'.join(p.reduce)}, " if p.reduce else ""
    reduced = f"  {summed}bucket {p.bucket}" if p.reduce or p.bucket >= 0 else ""
    return f"{names}  {show(p.shape, p.dtype, p.layout)}{reduced}{'' if p.requires_grad else '  frozen'}"


def buffer_text(b: Buffer) -> str:
    names = plain(" = ".join((b.fqn, *b.aliases))) if b.constant is None else f"constant {b.name}"
    updated = "  updated by the sum over microbatches" if b.adds else "  updated" if b.updated else ""
    return f"{names}  {b.value}{updated}{'' if b.persistent or b.constant is not None else '  not saved'}"


def output_text(o: Output, program: Program) -> str:
    """Return e.g. `accuracy  f32[] +dp  summed over microbatches, divided by 'accuracy (count)'`."""
    adds = ["summed over microbatches"] if o.adds and program.microbatches > 1 else []
    adds += [f"divided by {o.divisor!r}"] if o.divisor else []
    adds += [f"made by stage{o.stage}"] if program.axis else []
    return plain("  ".join([o.name, show(o.shape, o.dtype, o.layout), *([", ".join(adds)] if adds else [])]))


#: What is split, by the level of ZeRO.
_SPLIT = ("", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")


def bucket_text(b: Bucket, program: Program) -> str:
    nbytes = size(sum(program.param(n).value.nbytes(program.mesh) for n in b.params))
    some = f"{nbytes}, from {b.params[0]} to {b.params[-1]}"
    if not b.zero:
        return f"all_reduce over {'+'.join(b.axes)} of {plural(len(b.params), 'gradient')}, {some}"
    params = f"{plural(len(b.params), 'parameter')}, {some}"
    ahead = f"{plural(program.spec.data.prefetch, 'bucket')} ahead"
    if program.forward_only and b.zero == 3:
        return f"parameters split over {b.shard}: {params}; all_gather in forward, {ahead}"
    each = " of each microbatch" if b.each and program.microbatches > 1 else ""
    ways = [f"reduce_scatter over {b.shard}{each}"] if b.shard in b.axes else []
    rest = [a for a in b.axes if a != b.shard]
    ways += [f"all_reduce of the part over {'+'.join(rest)}"] if rest else []
    often = "once a step" if b.keep else f"in forward and in backward, {ahead}"
    after = f"all_gather {'in 8 bits ' if b.rounded else ''}{often}" if b.zero == 3 else "all_gather after the update"
    return f"{_SPLIT[b.zero]} split over {b.shard}: {params}; gradients: {', then '.join(ways) or 'no sum'}; {after}"


def edge_text(e: Edge, program: Program) -> str:
    nbytes = size(sum(v.nbytes(program.mesh) for v in e.values))
    return f"stage{e.source} -> stage{e.target}: {', '.join(e.names)}, {nbytes} a microbatch"


def region_head(r: Region) -> str:
    where = f"in {plain(r.parent)}, " if r.parent else ""
    repeats = f" and {plural(r.again, 'collective')}" if r.again else ""
    return (
        f"{where}keeps {size(r.kept)}{' on the CPU' if r.offload else ''}, computes {size(r.dropped)}{repeats} again "
        f" {plain(r.cause)}"
    )


def plain(text: str) -> str:
    """Replace unprintable characters by spaces: some readers take form feeds and others as line ends."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


# --- one line ---------------------------------------------------------------------------------------------------------


def source_text(source: Source) -> str:
    """Return `module (file.py:31): code`; the root module is `·`."""
    code = plain(source.code).strip()
    return f"{plain(source.module) or '·'} ({plain(source.line)})" + (f": {code}" if code else "")


def value_text(value: Value | tuple[Value, ...] | None) -> str:
    """Return the type of a result as `show` prints it; `?` for no tensor (uncanonical asserts, tapes)."""
    if value is None:
        return NO_TENSOR
    vs = value if isinstance(value, tuple) else (value,)
    one = " ; ".join(NO_TENSOR if v is None else str(v) + (" grad" if v.requires_grad else "") for v in vs)
    return f"({one})" if isinstance(value, tuple) else one


def comment(node: fx.Node) -> str:
    collective: Collective | None = node.meta.get("collective")
    parts = [value_text(node.meta["value"])]
    if "fused" in node.meta:
        parts.append(f"fused {node.meta['fused']}")
    if "copy" in node.meta:
        parts.append(f"copy {node.meta['copy'].bytes} {json.dumps(node.meta['copy'].cause)}")
    if "region" in node.meta:
        parts.append(region_text(node.meta["region"], node.meta.get("kept", ()), node.meta.get("again", 0)))
    return " | ".join(parts if collective is None else [*parts, collective_text(collective)])


def region_text(region: str, kept: Sequence[str], again: int) -> str:
    """Return `region "h.0"`, with ` kept "h.0"` for a kept result, ` again 1` for a repeated collective."""
    names = [json.dumps(n) for n in (region, *kept)]  # escaped: on one line, and read back as they are
    words = ["region", names[0], *(["kept", *names[1:]] if kept else []), *(["again", str(again)] if again else [])]
    return " ".join(words)


def collective_text(c: Collective) -> str:
    return (
        f"{c.kind}/{c.backward} {'+'.join(c.axes)} {f'{c.packed}/' if c.packed else ''}{c.bytes}"
        f" {'implicit ' if c.implicit else ''}{json.dumps(plain(c.cause), ensure_ascii=False)}"
    )


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_arg(node.args[0])}[{node.args[1]!r}]"
    args = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(args)})"


def target_text(target: Any) -> str:
    """Return the name of an op: `aten.add.Tensor`, `torch.ops.lib.op.default`, `ops.all_reduce`."""
    if isinstance(target, OpOverload):
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
    if a is None or isinstance(a, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
        return repr(a)
    if isinstance(a, torch.device):
        return f"torch.device({str(a)!r})"
    if isinstance(a, complex):
        return f"complex({str(a)!r})"
    raise TypeError(f"{a!r} of type {type(a).__name__} cannot stand in a program")


def last_uses(graph: fx.Graph) -> Mapping[fx.Node, list[fx.Node]]:
    """Return {node: the values that it is the last to read, or its own if nobody reads it}.

    Deleting them there keeps memory as eager code would.
    """
    last = {used: node for node in graph.nodes for used in (node, *node.all_input_nodes)}
    gone: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for used, user in last.items():
        gone[user].append(used)
    return gone
