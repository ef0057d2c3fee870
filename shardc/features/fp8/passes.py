"""Products: make linear layers multiply numbers of 8 bits (`precision: {products: fp8-rowwise}`).

    before   y = linear(x, w, b)                                bf16[8, 128, 256] grad      x: bf16[8, 128, 64]

    after    x_amax = fp8_amax(x, (1, 1, 0))                    f32[8, 128, 1]              the largest of each row
             x_fp8 = fp8_round(x, x_amax, 'e4m3', (1, 1, 0))    bf16[8, 128, 64] grad       values that float8 has
             w_amax = fp8_amax(w, (1, 0))                       f32[256, 1]
             y = fp8_linear(x_fp8, w, w_amax, 'fp8-rowwise')    bf16[8, 128, 256] grad      rounds w by its scales
             y_fp8 = fp8_grad(y,  w_amax, 'e4m3', (1, 1, 0))    bf16[8, 128, 256] grad      its gradient is rounded
             y_biased = add(y_fp8, b)

The pass edits the graph of one device, so one device computes the same, and later passes split it like any other ops.
Rounded values keep their dtype, which loses nothing (rounding). They are sent and kept as 8 bits, and
multiplied as 8 bits where a kernel exists (products). The pass runs before placement, because
the largest values of split granules must be compared over ranks, and after all passes that match layers by shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import Errors, ShardcError
from shardc.features.fp8 import section
from shardc.features.fp8.experts import fp8_experts, fp8_experts_apply
from shardc.features.fp8.packed_inputs import PackedInputs
from shardc.features.fp8.products import fp8_grad_of_data, fp8_grad_of_weight, fp8_linear
from shardc.features.fp8.recipe import RECIPES, Recipe, along
from shardc.features.fp8.rounding import fp8_amax, fp8_grad, fp8_round, fp8_round_grad, granules
from shardc.ir.graph import calls, copy_graph, source_of, value_of
from shardc.ir.metadata import Value
from shardc.ir.patterns import names_weight
from shardc.ir.program import Program
from shardc.ir.stored import Param, Rounded
from shardc.passes import Entry
from shardc.passes.base import Pass
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.derivatives.record import Ref, Type
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Template
from shardc.passes.joint.derivatives.transposed import Lines
from shardc.rules.experts import DOWN, DOWN_BIAS, TRANSPOSED, UP, UP_BIAS
from shardc.runtime import ops
from shardc.runtime.ops.factors import PRODUCTS, factors
from shardc.spec.model_names import Names

aten = torch.ops.aten
_CAST = aten._to_copy.default

#: For learned queries or positions with microbatches: one device rounds the sum of gradients, not each of them.
_ALIKE = "its input is the same in all microbatches, whose gradients would be rounded before they are added up"


@dataclass(frozen=True)
class Products(Pass):
    """Rounds what the chosen linear layers multiply. Notes the layers that it leaves as they are, and why."""

    def applies(self, program: Program) -> bool:
        return section.of(self.spec) is not None

    def run(self, program: Program) -> Program:
        products = section.of(self.spec)
        assert products is not None
        where = self.spec.where(("precision", "products"))
        self._check(products, program, where)
        graph = copy_graph(program.graph)
        writer = _Writer(graph, products.recipe)
        left: dict[str, list[str]] = {}
        chosen = _Chosen(products.match, program)
        several, of_batch = self.spec.batch.microbatches > 1, _of_batch(program, graph)
        for node in list(calls(graph)):
            if node.target is ops.experts:
                if why := chosen.unfit_experts(node, products.recipe):
                    left.setdefault(why, []).append(source_of(node).module)
                elif chosen.experts(node):
                    writer.experts(node)
            if node.target not in PRODUCTS or (p := chosen.weight(node)) is None:
                continue
            if why := _unfit(node, RECIPES[products.recipe].multiple):
                left.setdefault(why, []).append(p.fqn)
            elif several and value_of(node).requires_grad and node not in of_batch:
                left.setdefault(_ALIKE, []).append(p.fqn)
            else:
                writer.product(node)
        graph.lint()
        notes = [
            f"{where}: {products.recipe} leaves {_some(names)} as {'they are' if len(names) > 1 else 'it is'}: {why}"
            for why, names in left.items()
        ]
        if not writer.made:
            notes.append(f"{where}: {products.recipe} found no linear layer to compute in 8 bits")
        return replace(program, graph=graph, notes=(*program.notes, *notes))

    def _check(self, products: section.Products, program: Program, where: str) -> None:
        """Raise ShardcError for settings that change one device's numbers, and for patterns without a match."""
        if self.spec.precision.compute == "float16":
            fault = (
                f"products: {products.recipe} with compute: float16, which has no numbers for float8 times its scale"
            )
            raise ShardcError(fault, where=where, fix="write compute: bfloat16")
        microbatches = self.spec.batch.microbatches
        if not products.by_rows and microbatches > 1:
            fault = (
                f"fp8-tensorwise has one scale for the whole batch, and {microbatches} microbatches are computed one"
                " after the other: each would have its own scale, unlike on one device"
            )
            raise ShardcError(fault, where=where, fix="write fp8-rowwise or mxfp8, or microbatches: 1")
        errors = Errors()
        names = Names.of_weights({n: p.shape for p in program.params for n in p.names})
        sections = section.Sections.model_construct(precision=self.spec.precision)
        names.check_weights(sections.patterns(), self.spec.where, errors)
        errors.raise_any()


@dataclass
class _Chosen:
    """The parameters that are the weights of chosen layers."""

    patterns: Sequence[str]
    program: Program
    params: dict[str, Param] = field(init=False)

    def __post_init__(self) -> None:
        self.params = {p.name: p for p in self.program.params if not p.added}

    def weight(self, product: fx.Node) -> Param | None:
        """Return the weight of a product, perhaps cast; None if the operand is no weight of a chosen layer."""
        _, w, _ = factors(product.target, product.args)
        p = self._param(w)
        return p if p is not None and self._matches(p) else None

    def experts(self, node: fx.Node) -> list[Param]:
        """Return the expert weights that are chosen."""
        params = (self._param(node.args[at]) for at in (UP, DOWN))
        return [p for p in params if p is not None and self._matches(p)]

    def unfit_experts(self, node: fx.Node, recipe: str) -> str:
        """Return why chosen experts are not computed in 8 bits; "" if they are, or are not chosen."""
        count = len(self.experts(node))
        if not count:
            return ""
        if recipe != "fp8-rowwise":
            return f"products of experts are not implemented for {recipe}"
        if node.args[UP_BIAS] is not None or node.args[DOWN_BIAS] is not None:
            return "experts with biases are not implemented in 8 bits"
        if count < 2:
            return "both weights of experts must be rounded, or none"
        sizes = (n for at in (UP, DOWN) for n in value_of(node.args[at]).shape[1:])  # type: ignore[arg-type]
        if value_of(node.args[0]).dtype == torch.float16:  # type: ignore[arg-type]
            return "its input is not bfloat16 or float32"
        multiple = RECIPES[recipe].multiple
        return f"sizes are not multiples of {multiple}" if any(n % multiple for n in sizes) else ""

    def _param(self, w: Any) -> Param | None:
        while isinstance(w, fx.Node) and w.target is _CAST:
            w = w.args[0]
        return self.params.get(w.name) if isinstance(w, fx.Node) and w.op == "placeholder" else None

    def _matches(self, p: Param) -> bool:
        for pattern in reversed(self.patterns):
            if any(names_weight(pattern.removeprefix("!"), name) for name in p.names):
                return not pattern.startswith("!")
        return False


def _unfit(product: fx.Node, multiple: int) -> str:
    """Return why a product is not computed in 8 bits; "" if it is."""
    x, w, _ = factors(product.target, product.args)
    if len(value_of(w).shape) != 2 or product.kwargs or len(value_of(x).shape) < 2:
        return "it is not a product of rows with a matrix"
    if not value_of(x).dtype.is_floating_point or value_of(x).dtype == torch.float16:
        return "its input is not bfloat16 or float32"
    if any(n % multiple for n in value_of(w).shape):
        return f"sizes are not multiples of {multiple}"
    return ""


def _of_batch(program: Program, graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on the batch."""
    inputs, dependent = {i.name for i in program.inputs}, set[fx.Node]()
    for n in graph.nodes:
        if n.name in inputs if n.op == "placeholder" else not dependent.isdisjoint(n.all_input_nodes):
            dependent.add(n)
    return dependent


def _some(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass
class _Writer:
    """Rewrites products in its graph. made: the number of products rewritten."""

    graph: fx.Graph
    name: str
    made: int = 0
    found: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]

    def product(self, node: fx.Node) -> None:
        self.made += 1
        x, w, bias = factors(node.target, node.args)
        transposed, recipe = node.target is not aten.linear.default, self.recipe
        users, v = list(node.users), value_of(node)
        with self.graph.inserting_before(node):
            x8 = self._round(x, along(recipe.x, len(value_of(x).shape)), node)
            amax = self._amax(w, recipe.of_weight(transposed), node)
        node.target, node.args = fp8_linear, (x8, w, amax, self.name, *([True] if transposed else []))
        y, name = node, node.name
        if v.requires_grad:
            how = recipe.gradient, along(recipe.grad, len(v.shape))
            y = self._behind(y, fp8_grad, (y, amax if recipe.rows else None, *how), f"{name}_fp8")
        if bias is not None:
            y = self._behind(y, aten.add.Tensor, (y, bias), f"{name}_biased")
        for user in users if y is not node else ():
            user.replace_input_with(node, y)

    def experts(self, node: fx.Node) -> None:
        """Round the input and both weights of experts row by row."""
        self.made += 1
        x, up, down = (node.args[at] for at in (0, UP, DOWN))
        assert isinstance(x, fx.Node)
        assert isinstance(up, fx.Node)
        assert isinstance(down, fx.Node)
        transposed = len(node.args) > TRANSPOSED and bool(node.args[TRANSPOSED])
        granule = (1, 0, 1) if transposed else (1, 1, 0)
        with self.graph.inserting_before(node):
            x8 = self._round(x, (1, 0), node)
            scales = (self._amax(up, granule, node), self._amax(down, granule, node))
        node.target, node.args = fp8_experts, (x8, *node.args[1:TRANSPOSED], transposed, *scales)

    def _amax(self, x: fx.Node, granule: tuple[int, ...], product: fx.Node) -> fx.Node:
        """Return the granules' largest values, computed once for all products that take x."""
        if (x, granule) not in self.found:
            v = value_of(x)
            scales = Value(granules(v.shape, granule), torch.promote_types(v.dtype, torch.float32), False)
            self.found[x, granule] = self._call(fp8_amax, (x, granule), f"{x.name}_amax", scales, product)
        return self.found[x, granule]

    def _round(self, x: fx.Node, granule: tuple[int, ...], product: fx.Node) -> fx.Node:
        """Return the rounded value, computed once for all products that take x."""
        if (x, granule, "e4m3") not in self.found:
            args = (x, self._amax(x, granule, product), "e4m3", granule)
            self.found[x, granule, "e4m3"] = self._call(fp8_round, args, f"{x.name}_fp8", value_of(x), product)
        return self.found[x, granule, "e4m3"]

    def _behind(self, y: fx.Node, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """Insert a call with the type of y after y."""
        with self.graph.inserting_after(y):
            return self._call(target, args, name, value_of(y), y)

    def _call(self, target: Any, args: tuple[Any, ...], name: str, value: Value, like: fx.Node) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, {}, name=name)
        new.meta = {"value": value, "source": source_of(like)}
        return new


# --- what later passes ask: how a parameter is rounded (at ZeRO 3 then before it is gathered); derivatives

#: Ops that round the weights that they read: argument places of (weight, its largest values).
WEIGHTS: dict[Any, tuple[tuple[int, int], ...]] = {
    fp8_linear: ((1, 2),),
    fp8_experts: ((3, 9), (4, 10)),
    fp8_experts_apply: ((2, 8), (3, 9)),
}


def how_rounded(reader: fx.Node, x: fx.Node) -> Rounded | None:
    """Return how an op that reads x rounds it; None if it does something else with it."""
    amax: Any = reader if reader.target is fp8_amax else _largest(reader, x)
    if amax is None or sum(a is x for a in reader.args) != 1:
        return None
    of = amax.args[0] if amax.target is ops.all_reduce_max else amax
    whole = next((u for u in of.users if u.target is ops.all_reduce_max), of)
    if of.target is not fp8_amax or of.args[0] is not x or not any(_largest(u, x) is whole for u in whole.users):
        return None
    return Rounded("e4m3", tuple(of.args[1]), tuple(whole.args[2] if whole is not of else ()))


def _largest(reader: fx.Node, x: fx.Node) -> Any:
    """Return the largest values by which an op rounds x; None if it does not."""
    return next((reader.args[at] for weight, at in WEIGHTS.get(reader.target, ()) if reader.args[weight] is x), None)


def _rounded(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of `fp8_round`, which passes the gradient on, or of `fp8_grad`, which rounds it."""
    w, g = Lines(rank, call, request), Ref("g")
    if call.target is fp8_grad:
        g = w.call(fp8_round_grad, g, *call.args[1:], type_=request.tangents[0], **call.kwargs)
    grads: list[Ref | None] = [None] * len(request.operands)
    grads[call.args[0].index] = g
    return w.rule(grads, "transposed")


def _product(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of `fp8_linear`: the wanted gradients of its input and of its weight."""
    x, weight, amax, recipe, *rest = call.args
    transposed = bool(rest and rest[0])
    kept = rest[1] if len(rest) > 1 and rest[1] is not None else x
    w, how = Lines(rank, call, request), (recipe, transposed, request.operands[x.index].shape)
    grads: list[Ref | None] = [None] * len(request.operands)

    def made(at: Ref, target: Any, *args: Any) -> None:
        if request.wanted[at.index]:
            like = request.operands[at.index]
            like = replace(Type.contiguous(like.shape, like.dtype), ragged=like.ragged)
            grads[at.index] = w.call(target, Ref("g"), *args, *how, type_=like)

    made(x, fp8_grad_of_data, weight, amax)
    made(weight, fp8_grad_of_weight, kept)
    return w.rule(grads, "product")


_PRODUCTS = "after all that finds linear layers by shape; before place: its ops are placed too"
_PACKED_INPUTS = "after partition: it reads operands' layouts; before recompute counts bytes"
#: Each with the pass that it follows.
PASSES = (
    ("forward_only", Entry("products", Products, _PRODUCTS)),
    ("loss_chunks", Entry("packed_inputs", PackedInputs, _PACKED_INPUTS)),
)
#: By op.
DERIVATIVES = {fp8_round: _rounded, fp8_grad: _rounded, fp8_linear: _product}
