"""Let parts of a model see the ranks as another mesh: both meshes are made of the same digits.

    before   mesh dp=2 × tp=4          vision: {dp: 4, tp: 2}
    after    dp × tp.0=2 × tp.1=2      vision: rows over dp and tp.0, weights over tp.1; the rest: weights over both

Row digits of a part are the data axes' digits, and those that its mesh moves to them. What enters a part is pinned to
these rows, and so is what leaves it. Placement then splits all that is between, and converts at the border. Between two
pipeline stages a value is pinned to the rows of all digits: so each element crosses the border once, and the ranks of
the later stage gather what they need among themselves.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, permutations
from typing import Any

from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import operands_of, placeholders, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import Layout, Placement, Shard
from shardc.ir.program import Program
from shardc.passes.annotate import kv_heads
from shardc.passes.annotate.activations import Pin, insert_pin
from shardc.passes.annotate.batch_rows import batch_dim, batch_rows
from shardc.spec import Spec

#: (axis, outer, inner): the digits of an axis between two products of sizes. (tp, 1, 2) is the first digit, of size 2.
Piece = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class MeshPart:
    """Ops for which the ranks form the mesh `sizes`. where, cause: of the spec. is_stage: a stage of a pipeline."""

    name: str
    nodes: Collection[fx.Node]
    sizes: Mapping[str, int]
    where: str
    cause: str
    is_stage: bool = False


@dataclass(frozen=True)
class Digits:
    """A mesh in the digits that all parts share.

    axes: of each part, an axis -> its digits, outermost first. rows: of each part, the digits that split its rows in
    addition to those of the batch. of_node: the part of each op, and of each parameter by its first user.
    """

    mesh: Mesh
    axes: Mapping[MeshPart, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    rows: Mapping[MeshPart, tuple[str, ...]] = field(default_factory=dict)
    of_node: Mapping[fx.Node, MeshPart] = field(default_factory=dict)

    def of(self, node: fx.Node, axis: str) -> tuple[str, ...]:
        """Return the digits that an axis of the spec means for a parameter or an op."""
        part = self.of_node.get(node)
        return self.mesh.digits(axis) if part is None else self.axes[part].get(axis, ())

    @property
    def row_ranks(self) -> int:
        """The least common multiple of the numbers of ranks over which parts split a data rank's rows."""
        return math.lcm(*(math.prod(map(self.mesh.size, extra)) for extra in self.rows.values()))

    def sizes(self, axis: str) -> set[int]:
        """Return the sizes that an axis of the spec has in the mesh, and in parts."""
        own = {self.mesh.size(axis)} if axis in {n.partition(".")[0] for n in self.mesh.names} else set[int]()
        return own | {math.prod(map(self.mesh.size, axes.get(axis, ()))) for axes in self.axes.values()}


def find_digits(
    spec: Spec,
    program: Program,
    parts: Iterable[MeshPart],
    weight_axes: Collection[str],
    running: Program | None,
    errors: Errors,
) -> Digits:
    """Return the digits that parts and shared key-value heads need; those of `running` if it has any.

    spec: of one stage, with the axis of microbatches. weight_axes: those that split weights.
    """
    mesh, parts = spec.mesh, list(parts)
    names = [a for a in mesh.names if a != MICROBATCH]
    pieces = _pieces(mesh, parts, names)
    of_node = _parts_of(program, parts)
    heads = kv_heads.shared(program.graph)
    cuts: dict[str, dict[int, str]] = {a: {} for a in mesh.names}  # products of sizes -> the place in the spec
    for part, by_axis in pieces.items():
        for axis, outer, inner in (piece for own in by_axis.values() for piece in own):
            cuts[axis] |= {at: part.where for at in (outer, inner) if 1 < at < mesh.size(axis)}
    used = running.mesh if running is not None else mesh
    for axis in names:
        sizes = [used.size(digit) for digit in used.digits(axis)] if used.has(axis) else [mesh.size(axis)]
        cuts[axis] |= dict.fromkeys(list(accumulate(sizes, operator.mul))[:-1], spec.where(("mesh", axis)))
    for axis in sorted(weight_axes) if running is None else ():
        of_main: Piece = (axis, 1, mesh.size(axis))
        for one in (None, *parts):
            of_axis = [of_main] if one is None else pieces[one].get(axis, [])
            shared = [h for node, h in heads.items() if of_node.get(node) is one]
            for at in kv_heads.cuts(math.prod(inner // outer for _, outer, inner in of_axis), shared):
                for cut_axis, ranks in _cut(of_axis, at):
                    cuts[cut_axis].setdefault(ranks, one.where if one else spec.where(("mesh", axis)))
    for axis, places in cuts.items():
        products = [1, *sorted(places), mesh.size(axis)]
        odd = next(((a, b) for a, b in pairwise(products) if b % a), None)
        if odd is not None:
            fault = f"{axis}={mesh.size(axis)} has no digits for both {odd[0]} and {odd[1]} ranks"
            errors.add(
                fault, where=places[odd[0]], fix=f"choose sizes of which one divides the other, or another {axis}"
            )
        elif len(products) > 2:
            mesh = mesh.refine(axis, *(b // a for a, b in pairwise(products[:-1])))
    errors.raise_any()
    axes = {p: {a: _digits(mesh, own) for a, own in by_axis.items()} for p, by_axis in pieces.items()}
    of_batch = [d for d in mesh.digits(*spec.data_axes) if d != MICROBATCH and mesh.size(d) > 1]
    rows: dict[MeshPart, tuple[str, ...]] = {}
    for part in parts:
        split = {d for a in spec.data_axes for d in axes[part].get(a, ())}
        if fewer := [d for d in of_batch if d not in split]:
            fault = f"{part.name} splits the batch over fewer ranks than the mesh: not over {', '.join(fewer)}"
            fix = "write the fewest data ranks of all parts in `mesh`, and larger numbers in the parts"
            errors.add(fault, where=part.where, fix=fix)
        rows[part] = tuple(d for d in mesh.names if d in split and d not in of_batch)
    errors.raise_any()
    return Digits(mesh, axes, rows, of_node)


def _pieces(mesh: Mesh, parts: list[MeshPart], names: list[str]) -> dict[MeshPart, dict[str, list[Piece]]]:
    """Return what each axis of each part is made of, if possible of digits that all parts share.

    An axis of the mesh is dealt out to axes of a part in the order of the mesh, so that neighbours stay in inner axes;
    in another order if the cuts of several parts do not fit otherwise.
    """
    taken = {part: _taken(mesh, part.sizes, names) for part in parts}
    pieces: dict[MeshPart, dict[str, list[Piece]]] = {part: {} for part in parts}
    for axis in names:
        dealt = {p: tuple((to, taken[p][axis, to]) for to in names if (axis, to) in taken[p]) for p in parts}
        different = list(dict.fromkeys(dealt.values()))
        orders = itertools.product(*map(permutations, different))
        order = dict(zip(different, next(filter(_is_chain, orders), different), strict=True))
        for part in parts:
            outer = 1
            for to, n in order[dealt[part]]:
                pieces[part].setdefault(to, []).append((axis, outer, outer * n))
                outer *= n
    return pieces


def _taken(mesh: Mesh, sizes: Mapping[str, int], names: list[str]) -> dict[tuple[str, str], int]:
    """Return {(axis of the mesh, axis of the part): ranks of the first that belong to the second}.

    An axis keeps the largest common divisor of its two sizes; the rest goes to the axes that need more, in order.
    """
    kept = {a: math.gcd(mesh.size(a), sizes.get(a, 1)) for a in names}
    taken = {(a, a): n for a, n in kept.items()}
    left = {a: mesh.size(a) // n for a, n in kept.items()}
    need = {a: sizes.get(a, 1) // n for a, n in kept.items()}
    for to in names:
        for a in names:
            if (n := math.gcd(left[a], need[to])) > 1:
                taken[a, to] = n
                left[a], need[to] = left[a] // n, need[to] // n
    return {pair: n for pair, n in taken.items() if n > 1}


def _is_chain(ways: Iterable[Iterable[tuple[str, int]]]) -> bool:
    """Return whether of any two cuts of an axis, as products of sizes, one divides the other."""
    cuts = sorted({at for way in ways for at in accumulate((n for _, n in way), operator.mul)})
    return all(b % a == 0 for a, b in pairwise(cuts))


def _cut(pieces: Iterable[Piece], at: int) -> Iterator[tuple[str, int]]:
    """Yield (axis, product) where an axis has to be cut, so that a digit of these pieces ends at the product `at`."""
    before = 1
    for axis, outer, inner in pieces:
        if before < at < before * (inner // outer) and at % before == 0:
            yield axis, outer * (at // before)
        before *= inner // outer


def _digits(mesh: Mesh, pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Return the digits of pieces, in a mesh that has a digit for each of them."""
    digits: list[str] = []
    for axis, outer, inner in pieces:
        at = 1
        for digit in mesh.digits(axis):
            if outer <= at < inner:
                digits.append(digit)
            at *= mesh.size(digit)
    return tuple(digits)


def _parts_of(program: Program, parts: Iterable[MeshPart]) -> dict[fx.Node, MeshPart]:
    """Return the part of each op in one, and of each parameter whose first user is in one."""
    nodes = placeholders(program.graph)
    position = {n: i for i, n in enumerate(program.graph.nodes)}
    of_node = {n: part for part in parts for n in part.nodes}
    first = {p.name: min(nodes[p.name].users, key=position.__getitem__, default=None) for p in program.params}
    return of_node | {
        nodes[name]: of_node[user] for name, user in first.items() if user is not None and user in of_node
    }


def pin_parts(spec: Spec, program: Program, digits: Digits, errors: Errors) -> None:
    """Pin what enters and leaves the parts, and note the row digits at parameters.

    spec: of one stage, with the axis of microbatches. Adds errors for rows that a part's ranks do not divide.
    """
    dims = {x.name: batch_dim(spec, program, x) for x in program.inputs}
    inside = {p: {*p.nodes, *(u for n in p.nodes for u in n.users if "pin" in u.meta)} for p in digits.rows}
    computed, of_batch = _depending(program)
    pinned: set[MeshPart] = set()
    for part, nodes in inside.items():
        for node in [n for n in program.graph.nodes if n in nodes and n in computed]:
            if users := {u for u in node.users if u not in nodes}:
                layout = _leaving(spec, digits, part, node)
                pinned |= _pin(program, node, layout, part, users, digits.mesh)
    for part, nodes in ((p, inside[p]) for p in digits.rows if digits.rows[p]):
        read = dict.fromkeys(t for n in program.graph.nodes if n in nodes for t in operands_of(n))
        for node in [t for t in read if t not in nodes]:
            if node in computed or node in of_batch or node.name in dims or "pin" in node.meta:
                layout = _layout(spec, digits, node, {dims.get(node.name, 0): digits.rows[part]})
                pinned |= _pin(program, node, layout, part, {u for u in node.users if u in nodes}, digits.mesh)
        if part not in pinned:
            fault, fix = _indivisible(spec, program, part, digits)
            errors.add(fault, where=part.where, fix=fix)
    for param, part in digits.of_node.items():
        if param.op == "placeholder" and digits.rows[part]:
            param.meta["rows"] = digits.rows[part]


def _indivisible(spec: Spec, program: Program, part: MeshPart, digits: Digits) -> tuple[str, str]:
    """Return fault and fix of a part whose ranks divide the rows of nothing that enters or leaves it."""
    rows, _ = batch_rows(spec, program)
    ranks = math.prod(map(digits.mesh.size, (*spec.data_axes, *digits.rows[part])))
    number = digits.mesh.size(MICROBATCH) if MICROBATCH in digits.mesh.names else 1
    each = f" in {number} microbatches" if number > 1 else ""
    fault = f"{part.name} splits the batch of {rows} rows over {ranks // number} ranks{each}, which do not divide it"
    return fault, f"a batch of a multiple of {ranks} rows, fewer data ranks in this part, or `uneven: pad`"


def _depending(program: Program) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the values that depend on both the batch and parameters, and those of floats on the batch alone."""
    params, inputs = {p.name for p in program.params}, {x.name for x in program.inputs}
    depends: dict[fx.Node, frozenset[str]] = {}
    for n in program.graph.nodes:
        kind = {"weights"} if n.name in params else {"batch"} if n.name in inputs else set[str]()
        depends[n] = frozenset(kind).union(*(depends[x] for x in n.all_input_nodes))
    both = {n for n, kinds in depends.items() if n.op == "call_function" and len(kinds) == 2}
    alone = (n for n, kinds in depends.items() if kinds == {"batch"})
    return both, {n for n in alone if any(v.dtype.is_floating_point for v in values_of(n)[:1])}


def _leaving(spec: Spec, digits: Digits, part: MeshPart, node: fx.Node) -> Layout | None:
    """Return how a part returns a value: its rows; between stages split by all digits, along one more dim if needed."""
    mesh, extra = digits.mesh, digits.rows[part]
    if part.is_stage:
        taken = {*mesh.digits(*spec.data_axes), *extra, *(a for a, _ in node.meta.get("pin", Layout()).items)}
        others = tuple(a for a in mesh.names if a not in taken)
        for dims in ({0: (*extra, *others)}, {0: extra, 1: others}):
            if (layout := _layout(spec, digits, node, dims)) is not None:
                return layout
    return _layout(spec, digits, node, {0: extra})


def _layout(spec: Spec, digits: Digits, node: fx.Node, dims: Mapping[Any, tuple[str, ...]]) -> Layout | None:
    """Return a value's layout: the first dim (None: it has none) has its rows, which the batch's axes split already.

    None if ranks do not divide a dim.
    """
    v, row_dim = node.meta.get("value"), next(iter(dims))
    if v is None or isinstance(v, tuple) or row_dim is None:
        return None
    mesh = digits.mesh
    placements: dict[str, Placement] = {}
    for dim, names in dims.items():
        of_batch = math.prod(map(mesh.size, spec.data_axes)) if dim == row_dim else 1
        size = v.shape[dim] if dim < len(v.shape) else 0
        pad = spec.uneven == "pad" and dim == row_dim
        padding, split = -size % (of_batch * digits.row_ranks) if pad else 0, 1  # the padding of the batch
        for digit in names:
            placements[digit] = Shard(dim, split, padding=padding)
            split *= mesh.size(digit)
        if not size or (size + padding) % (split * of_batch):
            return None
    return Layout.of(placements, mesh)


def _pin(
    program: Program, node: fx.Node, layout: Layout | None, part: MeshPart, users: set[fx.Node], mesh: Mesh
) -> set[MeshPart]:
    """Pin a value for some of its users, if it has a layout; return the part, if so."""
    if layout is None or not layout.items:
        return set()
    insert_pin(program.graph, node, Pin(layout, part.cause, users), mesh).meta["border"] = True
    return {part}
