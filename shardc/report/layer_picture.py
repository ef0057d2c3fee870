"""One module of a program as a picture: its ops as boxes with their split weights, and the collectives between them.

Ops that only view a tensor in another shape are left out; so are copies of parameters. Colours say over which axes of
the mesh a weight is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import source_of
from shardc.ir.metadata import Collective, Value
from shardc.ir.patterns import nearest
from shardc.ir.program import Program
from shardc.ir.units import size
from shardc.report.colours import DARK_GREY, DEEP_RED, INK, PALE, PALE_GREY, SOFT, WHITE
from shardc.report.drawn_ops import is_view, op_name, traced
from shardc.report.graph_drawing import Placed, place
from shardc.report.svg import Picture
from shardc.rules import registry
from shardc.runtime import ops

#: One colour for each way of splitting weights.
_SPLIT, _WHOLE, _COLLECTIVE = PALE, PALE_GREY, DEEP_RED
_ROW, _LINE, _CHARACTER = 30.0, 15.0, 6.2
#: A module of more ops is no picture.
MOST = 250


@dataclass
class _Box:
    """What is drawn for a node. lines: what it says. pill: it is a collective; split: axes that its weights are on."""

    node: fx.Node | None
    lines: list[str]
    pill: bool = False
    split: tuple[str, ...] = ()
    uses: list[tuple[fx.Node, str]] = field(default_factory=list)  # (node that is drawn, type of what is passed)

    @property
    def width(self) -> float:
        return 20 + max(_CHARACTER * len(line) for line in self.lines)

    @property
    def height(self) -> float:
        return 8 + _LINE * len(self.lines)


def draw(program: Program, module: str) -> str:
    """A complete SVG file of a module's part of a stage. module: its name in the model, "." for all of it.

    Raises ShardcError for a module that has no ops, and for one of too many.
    """
    graph, inside = _nodes(program, module)
    boxes = _merged(_boxes(program, module, inside), module)
    if len(boxes) > MOST:
        raise ShardcError(f"{len(boxes)} ops are too many to draw", where="--draw", fix="name a smaller module")
    for given in {node: 0 for box in list(boxes.values()) for node, _ in box.uses if node not in boxes}:
        boxes[given] = _Box(given, [_origin(given)])
    order = [n for n in graph.nodes if n in boxes]
    edges = [(a, n) for n in order for a, _ in boxes[n].uses]
    return _picture(program, module, boxes, order, place({n: boxes[n].width for n in order}, edges))


def _nodes(program: Program, module: str) -> tuple[fx.Graph, set[fx.Node]]:
    """The graph of the first stage that has ops of the module, and these."""
    stages = [s.graph for s in program.stages] or [program.graph]
    for graph in stages:
        inside = {n for n in graph.nodes if n.op == "call_function" and _within(source_of(n).module, module)}
        if inside:
            return graph, inside
    modules = {source_of(n).module for graph in stages for n in graph.nodes if n.op == "call_function"}
    parents = {".".join(m.split(".")[:i]) for m in modules for i in range(1, m.count(".") + 2)} - {""}
    close = nearest(module, sorted(parents))
    fix = f"did you mean {close}?" if close else "name a module of the model, or . for all of it"
    raise ShardcError(f"no op of the program is in a module {module!r}", where="--draw", fix=fix)


def _within(name: str, module: str) -> bool:
    return module == "." or name == module or name.startswith(f"{module}.")


def _boxes(program: Program, module: str, inside: set[fx.Node]) -> dict[fx.Node, _Box]:
    params = {p.name: p for p in program.params}
    boxes: dict[fx.Node, _Box] = {}
    for n in (n for n in _in_order(inside) if not is_view(n)):
        sent: Collective | None = n.meta.get("collective")
        operands = [(x, traced(x)) for x in n.all_input_nodes]
        weights = [params[t.name] for _, t in operands if t.name in params]
        if sent is not None:
            if weights or n.target in (ops.gather_start, ops.gather_wait):
                continue
            box = _Box(n, _pill(sent), pill=True)
        else:
            box = _Box(n, [_title(n, module), *(_weight(p, module) for p in weights)], split=_axes(weights))
        box.uses = _once((t, _type(x)) for x, t in operands if t.name not in params and t.meta.get("value") is not None)
        boxes[n] = box
    return boxes


def _merged(boxes: dict[fx.Node, _Box], module: str) -> dict[fx.Node, _Box]:
    """Ops of one submodule in one box, such as those of a norm, where nothing else comes between them."""
    by_module: dict[str, list[fx.Node]] = {}
    for n, box in boxes.items():
        if not box.pill and source_of(n).module not in (module, ""):
            by_module.setdefault(source_of(n).module, []).append(n)
    for group in (g for g in by_module.values() if len(g) > 1 and _together(boxes, g)):
        names = list(dict.fromkeys(op_name(n) for n in sorted(group, key=_no_product)))
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more ops" if len(names) > 3 else "")
        one = _Box(group[-1], [_title(group[0], module).rpartition(": ")[0], listed])
        one.lines += [line for n in group for line in boxes[n].lines[1:]]
        one.split = tuple(dict.fromkeys(axis for n in group for axis in boxes[n].split))
        one.uses = _once(use for n in group for use in boxes[n].uses if use[0] not in group)
        boxes = {n: one if n is one.node else box for n, box in boxes.items() if n is one.node or n not in group}
    return boxes


def _once(uses: Iterable[tuple[fx.Node, str]]) -> list[tuple[fx.Node, str]]:
    """One edge from each source, with the type of what is first taken from it."""
    first: dict[fx.Node, str] = {}
    for source, kind in uses:
        first.setdefault(source, kind)
    return list(first.items())


def _no_product(n: fx.Node) -> bool:
    """Whether an op is none of those that most of the time goes to."""
    rule = registry.find(n.target)
    return rule is None or rule.flops is None


def _together(boxes: dict[fx.Node, _Box], group: list[fx.Node]) -> bool:
    """Whether values of a group are used by itself only, but for those of its last op."""
    inner = set(group[:-1])
    return not any(used in inner for n, box in boxes.items() if n not in group for used, _ in box.uses)


def _in_order(nodes: set[fx.Node]) -> Iterator[fx.Node]:
    graph = next(iter(nodes)).graph
    return (n for n in graph.nodes if n in nodes)


def _title(n: fx.Node, module: str) -> str:
    own = source_of(n).module
    own = own.removeprefix(module).lstrip(".") if module != "." else own
    return f"{own}: {op_name(n)}" if own else op_name(n)


def _weight(p: Any, module: str) -> str:
    last = p.fqn.rpartition(".")[2]
    return f"{last}  {p.value}"


def _axes(weights: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for p in weights for axis, _ in p.layout.shards()))


def _pill(c: Collective) -> list[str]:
    ways = [f"{kind}{when}" for kind, when in ((c.kind, ""), (c.backward, " in backward")) if kind != "none"]
    return [
        f"{', '.join(ways)} over {'+'.join(c.axes)}, {size(c.bytes)}"
        + (f", {size(c.packed)} in forward" if c.packed else "")
    ]


def _origin(n: fx.Node) -> str:
    if n.op == "placeholder":
        return n.name
    return f"from {source_of(n).module or op_name(n)}"


def _type(n: fx.Node) -> str:
    value = n.meta.get("value")
    return str(value) if isinstance(value, Value) else ""


# --- the drawing


def _picture(program: Program, module: str, boxes: dict[fx.Node, _Box], order: list[fx.Node], placed: Placed) -> str:
    rows = max(placed.layers.values()) + 1
    heights = [max(boxes[n].height for n in order if placed.layers[n] == i) for i in range(rows)]
    tops = [64.0]
    for height in heights:
        tops.append(tops[-1] + height + _ROW)
    name = program.meta.get("model", "the model") if module == "." else module
    title = f"{name} on {program.mesh}: what a rank runs"
    width = max(placed.width + 260, 8 * len(title) + 40, 560)
    left = (width - placed.width) / 2 - 60
    picture = Picture(width, tops[-1] + 44, title)
    picture.text(16, 26, title, size=14, bold=True)
    key = "8@dp: a dim of 8, split over dp; +tp: a partial sum; ~tp: a partial gradient"
    picture.text(16, 44, key, size=11, kind="soft")

    def top(n: fx.Node) -> float:
        i = placed.layers[n]
        return tops[i] + (heights[i] - boxes[n].height) / 2

    for n in order:
        for i, (source, kind) in enumerate(boxes[n].uses):
            points = [(left + placed.centres[source], top(source) + boxes[source].height)]
            layers = range(placed.layers[source] + 1, placed.layers[n])
            points += [
                (left + x, tops[layer] + y)
                for layer, x in zip(layers, placed.bends[source, n], strict=True)
                for y in (0.0, heights[layer])
            ]
            points.append((left + placed.centres[n], top(n)))
            picture.path(_curve(points), stroke=SOFT, width=1.2, title=kind)
            if i == 0 or source is not boxes[n].uses[0][0]:
                first = next(u for u in order if any(s is source for s, _ in boxes[u].uses))
                if first is n:
                    x, y = points[0]
                    picture.text(x + 6, y + 12, kind, size=10, kind="soft")
    for n in order:
        _box(picture, boxes[n], left + placed.centres[n], top(n), _colours(boxes))
    entries = [
        (colour, f"weights split over {'+'.join(axes)}" if axes else "nothing split")
        for axes, colour in _colours(boxes).items()
    ]
    picture.legend(16, tops[-1], entries)
    return str(picture)


def _colours(boxes: dict[fx.Node, _Box]) -> dict[tuple[str, ...], str]:
    splits = sorted({b.split for b in boxes.values() if b.split})
    return {(): _WHOLE, **{axes: _SPLIT[i % len(_SPLIT)] for i, axes in enumerate(splits)}}


def _box(picture: Picture, box: _Box, x: float, y: float, colours: dict[tuple[str, ...], str]) -> None:
    if box.pill:
        picture.rect(x - box.width / 2, y, box.width, box.height, _COLLECTIVE, round_=11)
        picture.text(x, y + 15.5, box.lines[0], size=11, anchor="middle", fill=WHITE)
        return
    given = not box.uses and not box.split and len(box.lines) == 1
    picture.rect(
        x - box.width / 2, y, box.width, box.height, "none" if given else colours[box.split], stroke=SOFT, round_=4
    )
    for i, line in enumerate(box.lines):
        ink = "" if given else INK if i == 0 else DARK_GREY
        picture.text(x, y + 15.5 + _LINE * i, line, size=11, anchor="middle", bold=i == 0 and not given, fill=ink)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Through the points, each piece begins and ends going down."""
    x, y = points[0]
    d = [f"M{x:.1f},{y:.1f}"]
    for to_x, to_y in points[1:]:
        middle = (y + to_y) / 2
        d.append(f"C{x:.1f},{middle:.1f} {to_x:.1f},{middle:.1f} {to_x:.1f},{to_y:.1f}")
        x, y = to_x, to_y
    return "".join(d)
