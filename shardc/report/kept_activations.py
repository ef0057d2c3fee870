"""Show what forward keeps for backward: by layer, each tensor with the ops that need it.

model.layers.0 and 3 more like it: 90.5 KiB each
     36.0 KiB  40 %  mlp.gate_proj linear  f32[4, 32, 96]  wanted by mlp.act_fn silu; mlp.down_proj linear after silu
     ...
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardc.cost import Cost
from shardc.cost.kept_activations import Kept
from shardc.ir.graph import source_of
from shardc.ir.types import op_name
from shardc.ir.units import plural, size
from shardc.layer_names import layer_of
from shardc.report.aligned import aligned

#: Tensors of less than this share of a layer's bytes are counted in one line.
SMALL = 0.01

#: The largest number of ops that are named as users of a tensor.
MOST = 4


#: One row of a layer's table: bytes, op, type, why it is kept.
_Line = tuple[int, str, str, str]


def table(cost: Cost) -> str:
    """Format the kept tensors of each layer, equal layers once, then those outside of layers."""
    layers: dict[str, list[_Line]] = {}
    for x in (x for items in cost.kept() for x in items):
        layer = layer_of(source_of(x.node).module)
        name = ".".join(filter(None, layer)) if layer else ""
        layers.setdefault(name, []).append(_line(x, name))
    groups: dict[tuple[_Line, ...], list[str]] = {}
    for name, lines in layers.items():
        groups.setdefault(tuple(lines), []).append(name)
    text = [f"kept from forward to backward, {'of a microbatch, ' if cost.program.microbatches > 1 else ''}by layer"]
    for items, names in sorted(groups.items(), key=lambda item: not item[1][0]):
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        nbytes = size(sum(x[0] for x in items)) + (" each" if more else "")
        text += ["", f"{names[0] or 'outside of layers'}{more}: {nbytes}", *_rows(items)]
    return "\n".join(text)


def _rows(lines: Iterable[_Line]) -> list[str]:
    """Format the tensors of a layer, the largest first."""
    ordered = sorted(lines, key=lambda x: -x[0])
    total = max(sum(x[0] for x in ordered), 1)
    large = [x for x in ordered if x[0] >= SMALL * total]
    small = ordered[len(large) :]
    cells = [(size(nbytes), f"{100 * nbytes / total:.0f} %", *texts) for nbytes, *texts in large]
    if small:
        cells.append((size(sum(x[0] for x in small)), "", plural(len(small), "small tensor"), "", ""))
    return [f"  {line}" for line in aligned(cells, ">><")]


def _line(x: Kept, layer: str) -> _Line:
    if x.own:
        why = "made by the op for its own backward"
    else:
        after = (f" after {', '.join(op_name(n.target) for n in again)}" if again else "" for again in x.wants.values())
        wants = list(dict.fromkeys(map("".join, zip((_op(n, layer) for n in x.wants), after, strict=True))))
        more = f"; {len(wants) - MOST} more" if len(wants) > MOST else ""
        why = f"wanted by {'; '.join(wants[:MOST])}{more}" if wants else ""
    return x.storage.nbytes, _op(x.node, layer), x.type, why


def _op(node: fx.Node, layer: str) -> str:
    """Return an op with its module: `mlp.gate_proj linear`, or `the next layer's norm mul`."""
    module, name = source_of(node).module, op_name(node.target)
    if layer and (parts := layer_of(module)) is not None:
        number = int(parts[1]) - int(layer.rpartition(".")[2])
        if parts[0] == layer.rpartition(".")[0] and number in (0, 1):
            inside = module.removeprefix(".".join(filter(None, parts))).removeprefix(".")
            return " ".join(filter(None, ("the next layer's" if number else "", inside, name)))
    return f"{module} {name}".strip()
