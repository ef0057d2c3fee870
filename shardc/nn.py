"""Functions that torch has no op for: plain and differentiable, so a model also runs without shardc.

y = shardc.nn.experts(x, index, weights, self.gate_up, self.down)          instead of a Python loop over experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime.ops.experts import op as experts_op
from shardc.runtime.ops.experts.activation import PARTS, elementwise, read
from shardc.runtime.ops.experts.products import experts as run
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, traced_on

Activation = str | Callable[[Tensor], Tensor]


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation = "silu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Compute a mixture of experts, f[..., h] like x: per token the weighted sum of its experts' results.

        y[t] = sum over k of weights[t, k] * expert(index[t, k], x[t])
        expert(e, x) = down[e] @ activation(up[e] @ x + up_bias[e]) + down_bias[e]

    x: tokens f[..., h]. index: the experts chosen for each, i64[..., k]; a number outside of 0 .. e-1 drops that
        choice. weights: of the choices, f[..., k]. Both come from the model's router, which may be of any kind.
    up: f[e, m, h], down: f[e, h, i], as torch.nn.Linear stores weights; transposed: f[e, h, m] and f[e, i, h]. Biases
        f[e, m], f[e, h].
    activation: the name of a function in torch.nn.functional: with m = 2 i it is gated, activation(gate) * up for
        columns [gate | up]. Or a function of the first product, f[n, m] -> f[n, i], made of elementwise ops on all
        columns, on equal parts of them (`chunk`), or on every k-th (`[:, ::2]`).

    shardc captures it as one op, whose experts `experts:` spreads over ranks. Rows are computed in the dtype of `up`.
    Raises ShardcError for shapes that do not fit together, and for an activation that is not of this form.
    """
    _check(x, index, weights, up, down, up_bias, down_bias, transposed)
    h, k = x.shape[-1], index.shape[-1]
    m, i = (up.shape[2], down.shape[1]) if transposed else (up.shape[1], down.shape[2])
    flat = x.reshape(-1, h), index.reshape(-1, k), weights.reshape(-1, k)
    if any(isinstance(t, FakeTensor) for t in (x, up, index)):
        result = experts_op.experts(*flat, up, down, up_bias, down_bias, text_of(activation, m, i), transposed)
    else:
        function = activation if callable(activation) else read(text_of(activation, m, i))
        result = run(*flat, up, down, up_bias, down_bias, function, transposed)
    y: Tensor = result.reshape(x.shape)
    return y


def _check(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    transposed: bool,
) -> None:
    def wrong(what: str, fix: str) -> ShardcError:
        return ShardcError(f"experts: {what}", where=source.of_call().line, fix=fix)

    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
        fault = (
            f"up {list(up.shape)} and down {list(down.shape)} are not stacks of matrices, one of each for every expert"
        )
        raise wrong(fault, "up [experts, m, hidden] and down [experts, hidden, i]")
    e, (m, h) = up.shape[0], up.shape[:0:-1] if transposed else up.shape[1:]
    out, i = down.shape[:0:-1] if transposed else down.shape[1:]
    if (h, out) != (x.shape[-1], x.shape[-1]) or m % i:
        fault = f"up {list(up.shape)} and down {list(down.shape)} do not fit x {list(x.shape)}"
        other = "" if transposed else "; transposed=True for matrices stored [experts, in, out]"
        raise wrong(
            fault,
            f"up [experts, m, {x.shape[-1]}] and down [experts, {x.shape[-1]}, i], where m is i, or 2 i for a"
            f" gate{other}",
        )
    if index.shape != weights.shape or index.shape[:-1] != x.shape[:-1] or index.is_floating_point():
        fault = (
            f"index {index.dtype} {list(index.shape)} and weights {list(weights.shape)} are not choices of the tokens x"
            f" {list(x.shape)}"
        )
        raise wrong(
            fault,
            "integers and their weights, both of x's shape with the number of choices in the place of the last dim",
        )
    for name, bias, size in (("up_bias", up_bias, m), ("down_bias", down_bias, h)):
        if bias is not None and bias.shape != (e, size):
            raise wrong(f"{name} has shape {list(bias.shape)}", f"[{e}, {size}]: one row for every expert")


# --- activations as text ----------------------------------------------------------------------------------------------

FORM = (
    "elementwise torch ops, on all columns, on equal parts of them (y.chunk(2, -1)), or on every k-th (y[:, ::2]);"
    " no parameters"
)


def text_of(activation: Activation, m: int, i: int) -> str:
    """Return the text of an activation f[n, m] -> f[n, i]. Raises ShardcError if it has none."""
    return untraced(_traced, activation, m, i) if callable(activation) else _named(activation, m, i)


@lru_cache(maxsize=64)
def _named(activation: str, m: int, i: int) -> str:
    function = getattr(torch.nn.functional, activation, None)
    if not callable(function) or m not in (i, 2 * i):
        fault = f"experts: activation={activation!r} cannot make {i} columns of {m}"
        fix = "a function's name in torch.nn.functional, with m = i or 2 i; or a function of your own"
        raise ShardcError(fault, where=source.of_call().line, fix=fix)

    def named(y: Tensor) -> Tensor:
        if m == i:
            return function(y)  # type: ignore[no-any-return]
        gate, up = y.chunk(2, -1)
        return function(gate) * up  # type: ignore[no-any-return]

    return untraced(_traced, named, m, i)


def _refuse(what: str) -> ShardcError:
    return ShardcError(f"experts: {what}", where=source.of_call().line, fix=f"an activation is made of {FORM}")


def _traced(activation: Callable[[Tensor], Tensor], m: int, i: int) -> str:
    rows = 4 if 4 not in (m, i) else 3
    with torch.no_grad():
        graph = traced_on(activation, [torch.linspace(-1, 1, rows * m).view(rows, m)]).graph
    graph.eliminate_dead_code()
    columns: dict[fx.Node, Any] = {}  # node that only selects columns of x -> those columns
    names: dict[fx.Node, str] = {}
    letters = _letters()
    steps: list[str] = []
    word, parts = "", {0: "x"}

    def part(node: fx.Node) -> str:
        """Return the name of the part of x that a node selects."""
        nonlocal word, parts
        seen = columns[node]
        if not isinstance(seen, Tensor) or seen.shape != (rows, i):
            shape = list(seen.shape) if isinstance(seen, Tensor) else "many"
            raise _refuse(f"the activation uses columns {shape} of {m} as one operand, but its result has {i}")
        if m == i:
            return "x"
        whole = torch.arange(m).expand(rows, m)
        for how in [word] if word else PARTS:
            for p, piece in enumerate(PARTS[how](whole, m // i)):
                if torch.equal(piece, seen):
                    if not word:
                        word, parts = how, {p: next(letters) for p in range(m // i)}
                    return parts[p]
        raise _refuse("the activation takes columns that are not one of equal parts")

    def written(a: Any) -> str:
        if isinstance(a, fx.Node):
            return names[a] if a in names else part(a)
        if a is not None and not isinstance(a, (int, float, str, bool)):
            raise _refuse(f"the activation calls an op with {a!r}")
        return repr(a)

    for node in graph.nodes:
        if node.op == "placeholder":
            columns[node] = torch.arange(m).expand(rows, m)
        elif node.op == "output":
            (result,) = node.all_input_nodes or [None]
            if result is None or result not in names:
                raise _refuse("the activation computes nothing of the first product")
        elif (
            node.op == "call_function"
            and isinstance(node.target, OpOverload)
            and node.target.namespace == "aten"
            and _pointwise(node.target)
        ):
            letter = next(letters)
            text = ", ".join([*map(written, node.args), *(f"{k}={written(v)}" for k, v in node.kwargs.items())])
            steps.append(f"{letter} = {node.target.overloadpacket.__name__}({text})")
            names[node] = letter
        elif node.op == "call_function" and node.all_input_nodes and all(n in columns for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: columns[n])
            try:
                columns[node] = node.target(*args, **kwargs)
            except RuntimeError:  # not defined for integers: it computes
                raise _refuse(f"the activation calls {node.target}, which is not elementwise") from None
        else:
            raise _refuse(f"the activation calls {node.target}, which is not elementwise")
    steps[-1] = steps[-1].partition(" = ")[2]
    if word:
        steps.insert(0, f"{', '.join(parts.values())} = {word}(x)")
    text = "; ".join(steps)
    read(text)
    return text


def _pointwise(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags and elementwise(op.overloadpacket)


def _letters() -> Iterator[str]:
    names = list("abcdefghijklmnopqrstuvwyz")
    yield from names
    yield from (f"{a}{b}" for a in names for b in names if f"{a}{b}" not in ("as", "if", "in", "is", "or"))
