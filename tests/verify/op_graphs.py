"""Random graphs of the ops that have rules, on random specs and meshes: equal to one device, or refused.

    python -m tests.verify.op_graphs --seconds 600 [--seed 0] [--ranks 64]

A graph is made of sample calls of the rules (tests.rules.samples): operands become results of earlier calls where
their shapes can be made to fit, by views, reductions, slices and broadcasts, or parameters, buffers, inputs. Numbers
are small integers in float64, so that sums are exact in every order: then loss and gradients have to be equal to the
bit. Where an op leaves the integers they have to agree to 1e-11. The static checker has to prove every program. A case
is a seed; what fails is made smaller, ops and entries of the spec one by one, and belongs into test_op_graphs.py.
"""

from __future__ import annotations

import argparse
import functools
import math
import operator
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stored import Buffer, Input, Param
from shardc.ir.types import of_tensor, typed
from shardc.torch_private import OpOverload
from shardc.verify.rules.case import MISFIT, UNDEFINED
from tests.rules.samples import RNG, SAMPLES, Sample, Tensors
from tests.rules.torch_ops import TRUSTING

aten = torch.ops.aten
RTOL = 1e-11
MODULES = 4
MESHES: tuple[tuple[dict[str, int], int], ...] = (  # and how often
    ({"dp": 2}, 6),
    ({"tp": 2}, 8),
    ({"tp": 3}, 3),
    ({"dp": 2, "tp": 2}, 8),
    ({"tp": 2, "dp": 2}, 3),
    ({"a": 2, "b": 2}, 4),
    ({"dp": 3, "tp": 2}, 2),
    ({"tp": 4}, 2),
    ({"dp": 2, "tp": 4}, 1),
    ({"dp": 2, "a": 2, "b": 2}, 2),
    ({"pp": 2, "tp": 2}, 1),
    ({"dp": 4, "tp": 4}, 1),
)
LARGE: tuple[dict[str, int], ...] = ({"dp": 8, "tp": 8}, {"dp": 4, "a": 4, "b": 4}, {"tp": 12, "dp": 4})
#: Ops whose integer operands give integers, and whose gradients are integers, too.
EXACT = {
    *("add", "sub", "mul", "neg", "sum", "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand"),
    *("slice", "narrow", "cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "select", "flip", "roll"),
    *("relu", "abs", "sign", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "square"),
    *(
        "mm",
        "bmm",
        "matmul",
        "linear",
        "addmm",
        "baddbmm",
        "einsum",
        "mv",
        "dot",
        "cumsum",
        "max",
        "min",
    ),
    *("squeeze", "unsqueeze", "flatten", "unflatten", "repeat", "repeat_interleave", "tril", "triu", "diagonal"),
    *(
        "clone",
        "alias",
        "contiguous",
        "positive",
        "detach",
        "constant_pad_nd",
        "pad",
        "unfold",
        "index_select",
        "gather",
    ),
    *("embedding", "eq", "ne", "gt", "ge", "lt", "le", "logical_not", "any", "all", "argmax", "argmin", "sort", "topk"),
    *(
        "broadcast_to",
        "movedim",
        "index",
        "scatter_add",
        "index_add",
        "hardtanh",
        "rsub",
        "addcmul",
        "floor",
        "getitem",
    ),
    *("zeros_like", "ones_like", "full_like", "diag_embed", "count_nonzero", "numpy_T", "trace", "outer", "threshold"),
}
#: Of a singular matrix they are what rounding makes them, or their gradient is.
SINGULAR = {
    *("linalg_qr", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info", "lu", "linalg_det", "det"),
    *("_linalg_det", "linalg_inv", "linalg_inv_ex", "linalg_pinv", "linalg_cond"),
}
#: Results are kept below this, so that no sum of products leaves the integers of float64.
LARGEST = 1e6


@dataclass
class Value:
    """A value of a graph. tensor: as one device has it, with its gradient's graph."""

    tensor: Tensor
    leaf: str = ""  # param, buffer or input
    name: str = ""  # of a leaf, once it is captured: stays as the graph is made smaller
    call: Call | None = None
    index: int = -1  # of several results


@dataclass
class Call:
    """A call of a graph. args, kwargs: with `Value`s in place of tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    module: int = 0


@dataclass
class Graph:
    """What `made` makes: calls in order; terms: (value, weight) of the loss; exact: are all numbers integers?"""

    calls: list[Call]
    terms: list[tuple[Value, Value]]
    exact: bool = True
    random: bool = False
    names: list[str] = field(default_factory=list)


class Refused(Exception):
    """This call cannot be part of the graph."""


def integers(x: Tensor, rng: random.Random) -> Tensor:
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.randint(-3, 4, x.shape, generator=g).to(x.dtype)


def sampled() -> list[tuple[Any, Sample]]:
    """All sample calls of ops that a captured graph may have."""
    found = []
    for op, samples in SAMPLES.items():
        if isinstance(op, OpOverload) and op.namespace == "aten" and op not in UNDEFINED and str(op) not in TRUSTING:
            found += [(op, s) for s in samples]
    return found


@functools.cache
def _all() -> tuple[tuple[Any, Sample], ...]:
    return tuple(sampled())


def wrong_in_torch(op: Any, x: Any = None, *_: Any) -> bool:
    """Calls that torch (2.13) itself gets wrong."""
    match name_of(op):
        case "median" | "nanmedian":  # all medians of an expanded tensor are written to one place
            return 0 in x.stride()
        case "multilabel_margin_loss" | "multi_margin_loss":  # a single row gives [1] on the meta device, elsewhere []
            return bool(x.ndim == 1)
        case name if "eig" in name or "svd" in name or name in SINGULAR:
            return bool((torch.linalg.svdvals(x).amin(-1) < 1e-6).any()) if x.ndim > 1 and x.numel() else False
        case "matrix_exp":  # it refuses what is not contiguous, as what is gathered and then cut is not
            return True
    return False


@functools.cache
def _exact_ones() -> tuple[tuple[Any, Sample], ...]:
    return tuple((op, s) for op, s in _all() if name_of(op) in EXACT)


def name_of(op: Any) -> str:
    return op._schema.name.partition("::")[2] if isinstance(op, OpOverload) else op.__name__


def is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


class Maker:
    """Makes one graph."""

    def __init__(self, rng: random.Random, calls: int, *, exact: bool) -> None:
        self.rng, self.wanted, self.exact = rng, calls, exact
        self.pool: list[Value] = []  # float64
        self.calls: list[Call] = []
        self.random = False

    def graph(self) -> Graph:
        tries = 0
        while len(self.calls) < self.wanted and tries < 60:
            tries += 1
            op, sample = self.rng.choice(_exact_ones() if self.exact else _all())
            before = len(self.calls), len(self.pool)
            try:
                self.embed(op, sample)
            except (Refused, *MISFIT):
                del self.calls[before[0] :], self.pool[before[1] :]
        used = {id(v) for c in self.calls for v in values_in((c.args, c.kwargs))}
        ends = [v for v in self.pool if v.call is not None and id(v) not in used and v.tensor.requires_grad]
        if not ends:
            raise Refused
        terms = [
            (v, Value(integers(v.tensor.detach(), self.rng), self.rng.choice(("buffer", "param")))) for v in ends[-4:]
        ]
        shares = {aten.max.default, aten.min.default}  # equal extrema share the gradient, in fractions
        exact = all(name_of(c.op) in EXACT and c.op not in shares for c in self.calls) and all(
            whole(v.tensor) for v in self.pool
        )
        for i, c in enumerate(self.calls):
            c.module = i * MODULES // len(self.calls)
        return Graph(self.calls, terms, exact, self.random)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> list[Value]:
        """Call it; its float64 results join the pool. Raises Refused for results of no use."""
        given = map_values((args, kwargs), lambda v: v.tensor)
        if wrong_in_torch(op, *given[0]) or (name_of(op) == "mode" and not whole(given[0][0])):
            raise Refused  # which of two numbers comes more often, rounding decides
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = op(*given[0], **given[1])
        made = Call(op, args, kwargs, result)
        several = result if isinstance(result, (tuple, list)) else [result]
        found = []
        for i, x in enumerate(several):
            if not isinstance(x, Tensor) or x.numel() > 20_000:
                raise Refused
            if x.is_floating_point() and (not x.isfinite().all() or (x.numel() and x.abs().max() > LARGEST)):
                raise Refused
            if name_of(op).endswith(("slogdet", "logdet")) and x.is_floating_point() and (x < -20).any():
                raise Refused  # of a singular matrix: but for rounding it is -inf
            if name_of(op) in ("std", "std_mean") and i == 0 and ((x > 0) & (x < 1e-9)).any():
                raise Refused  # of equal entries: but for rounding it is 0, and has no gradient
            found.append(Value(x, "", "", made, i if several is result else -1))
        self.calls.append(made)
        self.pool += [v for v in found if is_real(v.tensor) and v.tensor.numel()]
        return found

    def embed(self, op: Any, sample: Sample) -> None:
        tensors = Tensors(self.rng.randrange(1 << 30))
        args, kwargs = sample(tensors)
        every = tensors_in((args, kwargs))
        free = [is_real(x) and not any(x is c for c in tensors) and bool((x < 0).any()) for x in every]
        domain = not any(free)  # such as logarithms, and decompositions of definite matrices

        def operand(x: Any) -> Any:
            if x is RNG:
                raise Refused
            if not isinstance(x, Tensor):
                return x
            if is_real(x) and not domain and not any(x is c for c in tensors) and bool((x < 0).any()):
                if self.rng.random() < 0.8 and (found := self.fitting(tuple(x.shape))) is not None:
                    return found
                return self.leaf(integers(x, self.rng))
            return self.leaf(x, constant=not is_real(x) or any(x is c for c in tensors))

        args, kwargs = fx.node.map_aggregate((tuple(args), dict(kwargs)), operand)
        self.call(op, *args, **kwargs)

    def leaf(self, x: Tensor, *, constant: bool = False) -> Value:
        x = x.detach().clone().contiguous()
        if constant or self.rng.random() < 0.25:
            kind = "buffer" if self.rng.random() < 0.5 or not x.dim() else "input"
            value = Value(x, kind)
        else:
            value = Value(x.requires_grad_(), "param")
        if is_real(x):
            self.pool.append(value)
        return value

    def fitting(self, shape: tuple[int, ...]) -> Value | None:
        """A value of the pool, made to have this shape; None if none can."""
        for value in self.rng.sample(self.pool, min(len(self.pool), 6)):
            found = self.reshaped(value, shape)
            if found is not None:
                return found
        return None

    def reshaped(self, v: Value, shape: tuple[int, ...]) -> Value | None:
        have = tuple(v.tensor.shape)
        if have == shape:
            return v
        if 0 in shape or not have:
            return self.call(aten.expand.default, v, list(shape))[0] if not have and 0 not in shape else None
        if sorted(have) == sorted(shape) and len(set(have)) == len(have) and self.rng.random() < 0.5:
            return self.call(aten.permute.default, v, [have.index(s) for s in shape])[0]
        if math.prod(have) == math.prod(shape):
            return self.call(self.rng.choice((aten.reshape.default, aten.view.default)), v, list(shape))[0]
        if len(have) == len(shape) and all(a >= b for a, b in zip(have, shape, strict=True)):
            for d, (a, b) in enumerate(zip(have, shape, strict=True)):
                if a > b:
                    start = self.rng.randint(0, a - b)
                    v = self.call(aten.slice.Tensor, v, d, start, start + b)[0]
            return v
        if len(have) == len(shape) and all(a in (b, 1) for a, b in zip(have, shape, strict=True)):
            return self.call(aten.expand.default, v, list(shape))[0]
        if len(have) < len(shape) and shape[len(shape) - len(have) :] == have:
            return self.call(aten.expand.default, v, list(shape))[0]
        if len(have) == len(shape) + 1:
            for d in range(len(have)):
                if have[:d] + have[d + 1 :] == shape:
                    return self.call(aten.sum.dim_IntList, v, [d])[0]
        if len(have) + 1 == len(shape):
            for d, s in enumerate(shape):
                if shape[:d] + shape[d + 1 :] == have:
                    wide = self.call(aten.unsqueeze.default, v, d)[0]
                    return wide if s == 1 else self.call(aten.expand.default, wide, list(shape))[0]
        return None


def whole(x: Tensor) -> bool:
    return not x.is_floating_point() or bool((x.detach() == x.detach().round()).all())


def values_in(x: Any) -> list[Value]:
    found: list[Value] = []
    map_values(x, lambda v: found.append(v))  # type: ignore[func-returns-value]
    return found


def map_values(x: Any, change: Callable[[Value], Any]) -> Any:
    if isinstance(x, Value):
        return change(x)
    if isinstance(x, (tuple, list)):
        return type(x)(map_values(y, change) for y in x)
    if isinstance(x, dict):
        return {k: map_values(y, change) for k, y in x.items()}
    return x


def tensors_in(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    fx.node.map_aggregate(x, lambda y: found.append(y) if isinstance(y, Tensor) else None)
    return found


def made(seed: str, calls: int, *, exact: bool) -> Graph | None:
    """A random graph; None where none came out."""
    try:
        return Maker(random.Random(seed), calls, exact=exact).graph()
    except Refused:
        return None


# --- as a captured program


@dataclass
class Captured:
    """model: holds the parameters and buffers; batch; program: as capture would give it; what one device computes."""

    model: nn.Module
    batch: dict[str, Tensor]
    program: Program
    loss: Tensor
    grads: dict[str, Tensor]
    exact: bool


def captured(g: Graph) -> Captured:
    model = nn.Module()
    for i in range(MODULES):
        model.add_module(f"m{i}", nn.Module())
    terms = [v for term in g.terms for v in term]
    where: dict[int, int] = {}
    leaves: dict[int, Value] = {}
    for c in g.calls:
        for v in values_in((c.args, c.kwargs)):
            if v.leaf:
                where.setdefault(id(v), c.module)
                leaves.setdefault(id(v), v)
    for v in terms:
        if v.leaf:
            where.setdefault(id(v), MODULES - 1)
            leaves.setdefault(id(v), v)
    graph = fx.Graph()
    for name in ("mesh", "rng"):
        graph.placeholder(name).meta["value"] = None
    nodes: dict[int, fx.Node] = {}
    names: dict[int, str] = {}
    batch: dict[str, Tensor] = {}
    params, buffers, inputs = [], [], []
    for kind in ("param", "buffer", "input"):
        for i, (key, v) in enumerate((k, v) for k, v in leaves.items() if v.leaf == kind):
            fqn = v.name = v.name or (f"x{i}" if kind == "input" else f"m{where[key]}.{kind[0]}{i}")
            module, _, name = fqn.rpartition(".")
            own = model.get_submodule(module)
            x = v.tensor.detach().clone()
            if kind == "param":
                own.register_parameter(name, nn.Parameter(x, requires_grad=True))
                v.tensor.requires_grad_()
            elif kind == "buffer":
                own.register_buffer(name, x)
            else:
                batch[fqn] = x
            node = graph.placeholder(fqn.replace(".", "_"))
            node.meta = {"value": of_tensor(x, kind == "param"), "source": Source()}
            nodes[key], names[key] = node, fqn
            shape = tuple(x.shape)
            if kind == "param":
                params.append(Param(node.name, fqn, shape, x.dtype, True))
            elif kind == "buffer":
                buffers.append(Buffer(node.name, fqn, shape, x.dtype))
            else:
                inputs.append(Input(node.name, (fqn,), shape, x.dtype))

    made_nodes: dict[int, fx.Node] = {}

    def node_of(v: Value) -> fx.Node:
        if v.leaf:
            return nodes[id(v)]
        whole_ = made_nodes[id(v.call)]
        if v.index < 0:
            return whole_
        if id(v) not in nodes:
            nodes[id(v)] = item = graph.call_function(operator.getitem, (whole_, v.index))
            item.meta = {"value": whole_.meta["value"][v.index], "source": whole_.meta["source"]}
        return nodes[id(v)]

    def emit(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, source: Source) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        node.meta = {"value": typed(result, op, node.args, node.kwargs), "source": source}
        return node

    for i, c in enumerate(g.calls):
        source = Source(f"m{c.module}", f"graph.py:{i + 1}", name_of(c.op))
        args, kwargs = map_values((c.args, c.kwargs), node_of)
        made_nodes[id(c)] = emit(c.op, args, kwargs, c.result, source)
    end, loss, total = Source("", f"graph.py:{len(g.calls) + 1}", "the loss"), None, None
    for v, w in g.terms:
        product = v.tensor * w.tensor
        term = product.sum()
        one = emit(aten.mul.Tensor, (node_of(v), node_of(w)), {}, product, end)
        one = emit(aten.sum.default, (one,), {}, term, end)
        loss = one if loss is None else emit(aten.add.Tensor, (loss, one), {}, total + term, end)
        total = term if total is None else total + term
    assert loss is not None
    assert total is not None
    graph.output((loss, ()))
    graph.eliminate_dead_code()
    graph.lint()
    wanted = [v for v in leaves.values() if v.leaf == "param"]
    grads = torch.autograd.grad(total, [v.tensor for v in wanted], allow_unused=True, retain_graph=True)
    by_name = {
        names[id(v)]: torch.zeros_like(v.tensor) if g_ is None else g_ for v, g_ in zip(wanted, grads, strict=True)
    }
    if not all(bool((x.abs() < 1e12).all()) for x in (total, *by_name.values())):
        raise Refused  # above: a derivative that is infinite but for rounding, as of a factor of a singular matrix
    program = Program(Mesh(()), graph, tuple(params), tuple(buffers), tuple(inputs), meta={"model": "Graph"})
    exact = g.exact and whole(total) and all(whole(x) for x in by_name.values())
    return Captured(model, batch, program, total.detach(), by_name, exact)


# --- specs


def spec_of(c: Captured, rng: random.Random, *, most: int) -> dict[str, Any]:
    """A random spec for it, of names and dims that it has."""
    if most >= 48 and rng.random() < 0.02:
        mesh = dict(rng.choice(LARGE))
    else:
        mesh = dict(rng.choices([m for m, _ in MESHES], [n for _, n in MESHES])[0])
    spec: dict[str, Any] = {"shardc": 1, "mesh": mesh}
    axes = [a for a in mesh if a not in ("dp", "pp")]
    sizes = Counter(s for x in c.batch.values() for s in x.shape if s > 1)
    rows = rng.choice(list(sizes)) if sizes else 0
    dims: dict[str, int | None] = {}
    for name, x in c.batch.items():
        at = [d for d, s in enumerate(x.shape) if s == rows]
        dims[name] = rng.choice(at) if at and rng.random() < 0.8 else None
    spec["batch"] = {"dims": dims} if dims else {}
    microbatches = rng.choice((1, 1, 1, 2, 3))
    if microbatches > 1 and any(d is not None for d in dims.values()):
        spec["batch"]["microbatches"] = microbatches
    if not any(d is not None for d in dims.values()):
        spec["batch"]["axes"] = []
    if rng.random() < 0.4:
        spec["uneven"] = "pad"

    def placed(shape: Sequence[int], count: int) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for axis in rng.sample(axes, min(count, len(axes))):
            at = [d for d, s in enumerate(shape) if s % mesh[axis] == 0 or (spec.get("uneven") and s > 1)]
            if at:
                found.setdefault(rng.choice(at), []).append(axis)
        return {d: a if len(a) > 1 else a[0] for d, a in found.items()}

    shard = {}
    for p in c.program.params:
        if p.shape and rng.random() < 0.5 and (dims_ := placed(p.shape, rng.choice((1, 1, 2)))):
            shard[p.fqn] = dims_
    if shard:
        spec["shard"] = shard
    ends = {str(n.meta["source"].module): n.meta["value"] for n in c.program.graph.nodes if n.op == "call_function"}
    ends = {m: v for m, v in ends.items() if m and not isinstance(v, tuple) and v.shape}
    for m, v in ends.items():
        if axes and rng.random() < 0.2:
            at = [d for d, s in enumerate(v.shape) if s % mesh[axes[0]] == 0] or [0]
            spec.setdefault("activations", {})[f"{m}{rng.choice(('', '', ':in'))}"] = {rng.choice(at): axes[0]}
    if "dp" in mesh and rng.random() < 0.5:
        spec["data"] = {"axis": "dp", "zero": rng.randint(0, 3), "bucket_mb": rng.choice((25, 0.0001))}
    if rng.random() < 0.15:
        spec["checkpoint"] = [
            {"match": f"m{rng.randrange(MODULES)}", "save": rng.choice(([], ["linear"], ["collective"]))}
        ]
    if rng.random() < 0.1:
        pass  # a number is drawn, so that the graphs of a seed stay the same
    if "pp" in mesh:
        spec["pipeline"] = {"axis": "pp", "cut": [rng.choice(list(ends)[1:] or ["m1"])]}
        spec["batch"] = {"dims": dims, "microbatches": 2} if dims else {}
    if not spec["batch"]:
        del spec["batch"]
    return spec


# --- one case


def check(c: Captured, spec: dict[str, Any]) -> str:
    """ "" if the spec compiles and gives what one device gives; "refused: ..."; or what is wrong, ending with `!`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = shardc.compile(c.model, c.batch, spec, captured=replace(c.program, meta=dict(c.program.meta)))
        except ShardcError as e:
            return f"refused: {e.errors[0].what}"
        except Exception:
            return f"compile raises: {_last(traceback.format_exc())}!"
        try:
            proof = program.prove()
        except Exception:
            return f"prove raises: {_last(traceback.format_exc())}!"
        try:
            sim = shardc.verify.simulate(program, c.model, c.batch)
        except ShardcError as e:
            return f"refused when it runs: {e.errors[0].what}"
        except Exception:
            return f"simulate raises: {_last(traceback.format_exc())}!"
    wrong = differences(c, sim.loss, sim.grads)
    if wrong and proof.ok:
        return f"WRONG AND PROVEN: {wrong}!"
    if wrong:
        return f"wrong: {wrong}; {proof.gaps[0]}!"
    if not proof.ok:
        return f"false alarm: {proof.gaps[0]}!"
    return ""


def differences(c: Captured, loss: Tensor, grads: dict[str, Tensor]) -> str:
    scale = max([1.0, *(float(x.abs().max()) for x in c.grads.values() if x.numel())])
    pairs = {"the loss": (loss, c.loss, abs(float(c.loss)) + 1)}
    for name, want in c.grads.items():
        pairs[f"the gradient of {name}"] = (grads.get(name, torch.zeros_like(want)), want, scale)
    for name, (got, want, size) in pairs.items():
        if got.shape != want.shape:
            return f"{name} has shape {list(got.shape)}"
        off = float((got - want).abs().max()) if got.numel() else 0.0
        if not off <= (0.0 if c.exact else RTOL * size):
            return f"{name} differs by {off:.3g}"
    return ""


def _last(text: str) -> str:
    lines = [x for x in text.strip().splitlines() if x.strip()]
    frames = [x.strip() for x in lines if x.strip().startswith("File ") and "/tests/" not in x]
    return f"{lines[-1][:200]} ({frames[-1][-80:] if frames else ''})"


# --- making a failing case smaller


def smaller_graph(g: Graph) -> list[Graph]:
    """Graphs with one end less, and without calls that nothing reads then."""
    found = []
    for i in range(len(g.terms)):
        if len(g.terms) > 1:
            found.append(_alive(replace(g, terms=[t for j, t in enumerate(g.terms) if j != i])))
    for i, c in enumerate(g.calls):  # an earlier value is the end
        several = c.result if isinstance(c.result, (tuple, list)) else [c.result]
        for j, x in enumerate(several):
            if is_real(x) and x.requires_grad and i < len(g.calls) - 1:
                v = Value(x, "", "", c, j if several is c.result else -1)
                weight = Value(integers(x.detach(), random.Random(i)), "buffer", f"m{MODULES - 1}.w{i}{j}")
                found.append(_alive(replace(g, terms=[(v, weight)])))
    for c in g.calls:  # an operand becomes a parameter
        for v in values_in((c.args, c.kwargs)):
            if v.call is not None and is_real(v.tensor):
                leaf = Value(v.tensor.detach().clone().requires_grad_(), "param", f"m{c.module}.n{id(v) % 100_000}")
                if (cut := _with(g, v, leaf)) is not None:
                    found.append(cut)
    return found


def _alive(g: Graph) -> Graph:
    needed, wanted = [], [v for v, _ in g.terms]
    ids: set[int] = set()
    while wanted:
        v = wanted.pop()
        if v.call is not None and id(v.call) not in ids:
            ids.add(id(v.call))
            wanted += values_in((v.call.args, v.call.kwargs))
    needed = [c for c in g.calls if id(c) in ids]
    return replace(g, calls=needed)


def _with(g: Graph, old: Value, new: Value) -> Graph | None:
    """The graph run anew with another value in the place of one."""
    again: dict[int, Value] = {}

    def changed(v: Value) -> Value:
        if v is old or (v.call is old.call and v.index == old.index and v.call is not None):
            return new
        if v.leaf:
            return v
        call = calls[id(v.call)]
        several = call.result if isinstance(call.result, (tuple, list)) else [call.result]
        key = id(v)
        if key not in again:
            again[key] = Value(several[max(v.index, 0)], "", "", call, v.index)
        return again[key]

    calls: dict[int, Call] = {}
    try:
        for c in g.calls:
            args, kwargs = map_values((c.args, c.kwargs), changed)
            given = map_values((args, kwargs), lambda v: v.tensor)
            calls[id(c)] = Call(c.op, args, kwargs, c.op(*given[0], **given[1]), c.module)
        terms = [(changed(v), w) for v, w in g.terms]
    except (*MISFIT, KeyError):
        return None
    if any(not v.tensor.requires_grad or v.leaf for v, _ in terms):
        return None
    return _alive(replace(g, calls=list(calls.values()), terms=terms))


def smaller_spec(spec: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for key in spec:
        if key in ("shardc",):
            continue
        if key != "mesh":
            found.append({k: v for k, v in spec.items() if k != key})
        value = spec[key]
        if isinstance(value, dict) and len(value) > 1:
            found += [{**spec, key: {k: v for k, v in value.items() if k != inner}} for inner in value]
        if isinstance(value, dict):
            for inner, x in value.items():
                if isinstance(x, dict) and len(x) > 1:
                    found += [{**spec, key: {**value, inner: {k: v for k, v in x.items() if k != i}}} for i in x]
    return found


def fitting(spec: dict[str, Any], c: Captured) -> dict[str, Any]:
    """The spec without what names a parameter, input or module that is gone."""
    names = {p.fqn for p in c.program.params}
    modules = {n.meta["source"].module for n in c.program.graph.nodes if n.op == "call_function"}
    spec = {**spec, "shard": {k: v for k, v in spec.get("shard", {}).items() if k in names}}
    spec["activations"] = {k: v for k, v in spec.get("activations", {}).items() if k.removesuffix(":in") in modules}
    spec["checkpoint"] = [x for x in spec.get("checkpoint", []) if x["match"] in modules]
    if "dims" in spec.get("batch", {}):
        spec["batch"] = {**spec["batch"], "dims": {k: v for k, v in spec["batch"]["dims"].items() if k in c.batch}}
    return {k: v for k, v in spec.items() if v}


def kind_of(result: str) -> str:
    return result.partition(":")[0] if result.endswith("!") else ""


def shrunk(g: Graph, spec: dict[str, Any], result: str, seconds: float = 60.0) -> tuple[Graph, dict[str, Any], str]:
    """The smallest graph and spec that fail in the same way, found greedily."""
    until = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < until:
        again = False
        for smaller in smaller_graph(g):
            try:
                c = captured(smaller)
                less = fitting(spec, c)
                found = check(c, less)
            except Exception:
                continue
            if kind_of(found) == kind_of(result):
                g, spec, result, again = smaller, less, found, True
                break
        for less in smaller_spec(spec):
            try:
                found = check(captured(g), less)
            except Exception:
                continue
            if kind_of(found) == kind_of(result):
                spec, result, again = less, found, True
                break
    return g, spec, result


def shown(g: Graph) -> str:
    """The graph as code."""
    names: dict[int, str] = {}
    made_names: dict[int, str] = {}
    lines = []

    def name(v: Value) -> str:
        if v.leaf:
            if id(v) not in names:
                names[id(v)] = f"{v.leaf}{len(names)}"
                lines.append(f"{names[id(v)]} = {v.leaf}{list(v.tensor.shape)} {v.tensor.dtype}")
            return names[id(v)]
        return made_names[id(v.call)] + (f"[{v.index}]" if v.index >= 0 else "")

    class Shown(str):
        __slots__ = ()

        def __repr__(self) -> str:
            return str(self)

    for i, c in enumerate(g.calls):
        args, kwargs = map_values((c.args, c.kwargs), lambda v: Shown(name(v)))
        made_names[id(c)] = f"v{i}"
        text = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        lines.append(f"v{i} = {c.op}({text})  # m{c.module}")
    lines += [f"loss += ({name(v)} * {name(w)}).sum()" for v, w in g.terms]
    return "\n".join(lines)


# --- many


def case(seed: int, number: int) -> tuple[Graph, Captured] | None:
    rng = random.Random(f"{seed} {number}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g = made(f"{seed} {number} graph", rng.randint(1, 8), exact=rng.random() < 0.6)
        try:
            return None if g is None else (g, captured(g))
        except Refused:
            return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--specs", type=int, default=6, help="of each graph")
    parser.add_argument("--ranks", type=int, default=64, help="of the largest mesh")
    parser.add_argument("--only", default="", help="one case: GRAPH or GRAPH.SPEC")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, number, cases = time.monotonic(), args.first, 0
    found: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    if args.only:
        args.first = number = int(args.only.partition(".")[0])
    while time.monotonic() - start < args.seconds:
        built = case(args.seed, number)
        for i in range(args.specs if built is not None else 0):
            if "." in args.only and i != int(args.only.partition(".")[2]):
                continue
            g, c = built  # type: ignore[misc]
            spec = spec_of(c, random.Random(f"{args.seed} {number} {i}"), most=args.ranks)
            result = check(c, spec)
            cases += 1
            for call in g.calls:
                ops[name_of(call.op)] += 1
            if not result.endswith("!"):
                found["equal" if not result else result[:70]] += 1
                continue
            found[kind_of(result)] += 1
            key = result[:90]
            seen[key] += 1
            if seen[key] > 1:
                continue
            g, spec, result = shrunk(g, spec, result)
            print(f"--- case {number}.{i} of seed {args.seed}\n{shown(g)}\n{spec}\n{result}\n", flush=True)
        number += 1
        if args.only:
            break
    took = time.monotonic() - start
    equal = found["equal"]
    print(f"{cases} cases of {number - args.first} graphs, {len(ops)} ops, {took:.0f} s: {equal} equal")
    for what, n in found.most_common(60):
        print(f"  {n:6}  {what}")
    sys.exit(any(kind in what for what in found for kind in ("WRONG", "wrong", "raises", "false alarm")))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
