"""Cut parameters into the matrices that an optimizer needs whole (`optimizer: {matrices: ...}`).

    whole      the parameter as the model has it: what one device's optimizer steps
    experts    each entry of dim 0 of a parameter of three dims or more
    heads      of weights that make queries, keys and values: each head's rows (attention ops show how many)
    {0: 3}     so many equal parts of a dim, or parts of these sizes

See program.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.errors import Errors
from shardc.features.matrices.program import Cut, Cuts, fault, with_cuts
from shardc.features.matrices.section import rules
from shardc.ir.graph import operands_of
from shardc.ir.patterns import names_weight
from shardc.ir.program import Program
from shardc.passes import Entry
from shardc.passes.annotate.kv_heads import shape_of, source_params
from shardc.passes.base import Pass
from shardc.rules import attention
from shardc.spec import Spec
from shardc.spec.model_names import Names

aten = torch.ops.aten


@dataclass(frozen=True)
class Matrices(Pass):
    """Records the cuts of every parameter; the graph stays the same."""

    def applies(self, program: Program) -> bool:
        return rules(self.spec) is not None

    def run(self, program: Program) -> Program:
        note = (
            "optimizer: {matrices: ...}: the traffic to owners of matrices and back is priced for Muon (AdamW for"
            " tables, head, norms and biases); program.cost(optimizer=...) prices it for another optimizer"
        )
        return replace(with_cuts(program, cuts_of(self.spec, program)), notes=(*program.notes, note))


#: Each with the pass that it follows.
PASSES = (("stack_experts", Entry("matrices", Matrices, "experts are matrices now, and attention ops show heads")),)


def cuts_of(spec: Spec, program: Program) -> Cuts:
    """Return {parameter: its cuts} for parameters that are cut.

    Raises ShardcError for patterns that match nothing, and for cuts that do not fit.
    """
    written, known = rules(spec) or {}, Names.of_weights({n: p.shapes[n] for p in program.params for n in p.names})
    errors, heads = Errors(), head_sizes(program.graph) if "heads" in written.values() else {}
    known.check_weights(((("optimizer", "matrices", text), text, False) for text in written), spec.where, errors)
    by_param: dict[str, tuple[Cut, ...]] = {}
    for p in program.params:
        matching = [g for g in written if any(names_weight(g, n) for n in (p.fqn, *p.names))]
        if not matching or not p.requires_grad:
            continue
        pattern = matching[0]
        where = spec.where(("optimizer", "matrices", pattern))
        shape = p.shape[1:] if p.members else p.shape
        cuts = _cuts(written[pattern], shape, heads.get(p.name))
        if wrong := fault(shape, cuts):
            errors.add(f"{p.fqn}: {wrong}", where=where, fix="write sizes that sum to it, or a number that divides it")
        elif written[pattern] == "heads" and not cuts and pattern != "*" and len(shape) > 1:
            what = f"{p.fqn} does not compute queries, keys or values of heads"
            errors.add(what, where=where, fix="name the number of its matrices, e.g. {0: 12}, or write whole")
        elif cuts:
            by_param[p.name] = cuts
    errors.raise_any()
    return by_param


def _cuts(
    rule: str | dict[int, int | tuple[int, ...]], shape: tuple[int, ...], head: tuple[int, int] | None
) -> tuple[Cut, ...]:
    """Return the cuts of a parameter by a rule. head: (dim, rows of a head in it)."""
    if isinstance(rule, dict):
        return tuple(Cut(d, _sizes(n, shape[d] if d < len(shape) else 0)) for d, n in sorted(rule.items()))
    if rule == "experts" and len(shape) > 2:
        return (Cut(0, (1,) * shape[0], alone=True),)
    if rule == "heads" and head is not None:
        dim, rows = head
        return (Cut(dim, (rows,) * (shape[dim] // rows)),)
    return ()


def _sizes(parts: int | tuple[int, ...], size: int) -> tuple[int, ...]:
    if isinstance(parts, tuple):
        return parts
    return (size // parts,) * parts


def head_sizes(graph: fx.Graph) -> dict[str, tuple[int, int]]:
    """Return {weight: (dim, rows of a head in it)} for the weights that make queries, keys or values."""
    sizes: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in attention.OPS:
            continue
        for x in operands_of(node)[:3]:
            rows = shape_of(x)[-1]
            for weight in source_params(x):
                dim = _out_dim(weight)
                if weight.meta["value"].requires_grad and dim is not None:
                    shape = weight.meta["value"].shape
                    if shape[dim] % rows == 0 and shape[dim] > rows:
                        sizes[weight.name] = dim, rows
    return sizes


def _out_dim(weight: fx.Node) -> int | None:
    """Return the dim of a two-dim weight that its product keeps."""
    if len(weight.meta["value"].shape) != 2:
        return None
    todo = [weight]
    while todo:
        for user in todo.pop().users:
            if user.target is aten.linear.default:
                return 0
            if user.target in (aten.mm.default, aten.matmul.default, aten.addmm.default):
                return 1
            if user.op == "call_function" and len(operands_of(user)) == 1:  # a cast
                todo.append(user)
    return None
