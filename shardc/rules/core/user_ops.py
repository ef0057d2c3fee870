"""Register rules of users' ops, with sample calls that prove them; every mistake names its line.

@torch.library.custom_op("mylib::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor: ...

shardc.rule(scale, "... d, d -> ... d", linear="0 | 1", samples=[lambda: (torch.randn(4, 12), torch.randn(12))])

def test_scale():
    shardc.check_rule(scale)

Rules of shardc are proven in the same way (shardc.verify.rules), on the samples in tests/rules/samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.rules.core import registry
from shardc.rules.core.notation import Notation, parse
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import RULES, ExtraOf, LinearOf, LocalOf, Rule, SignatureOf
from shardc.torch_private import OpOverload, overload_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Returns the arguments of a call. It adds operands by which the op cannot be differentiated to the list that it gets.
Sample = Callable[[list[Tensor]], Arguments]
SAMPLES: dict[Any, list[Sample]] = {}
#: `(x, w)`, `((x, w), {"eps": 1e-6})`, or a function that returns either.
Given = tuple[Any, ...] | Tensor | Callable[[], Any]


def rule(
    op: Any,
    notation: str | SignatureOf,
    *,
    linear: str | LinearOf = "",
    added: tuple[int, ...] = (),
    local: LocalOf | None = None,
    extra: ExtraOf | None = None,
    flops: Callable[[Call], int] | None = None,
    samples: Iterable[Given] = (),
) -> Rule:
    """Declare what may be split in a custom op, so that graphs with it can be sharded.

    Write it once, where the op is defined.

    >>> shardc.rule(scale, "... d, d -> ... d", linear="0 | 1", samples=[lambda: (torch.randn(4, 12), torch.randn(12))])

    op: what `torch.library.custom_op` or `triton_op` returned, `torch.ops.mylib.scale`, or one overload (`.default`).
    notation: tensor operands, an arrow, results; a name per dim, the same name where sizes are equal. `k+` is summed
    away (splitting it leaves partial sums), `k!` must stay whole, `...` is any leading dims, `(a b)` one dim of two
    factors. Or a function of the `Call` that returns `call.fit(notation)`, for dims that depend on arguments.
    linear: operands in which the op is linear, so that a partial sum may pass: "0 | 1" in each alone, "0 1" in both
    together.
    added: operands that are added once: they become partial when a summed factor is split (a bias).
    local, extra, flops: see shardc.rules.core.registry.
    samples: calls that prove it: tuples of arguments, or functions that return one. Dims of 12 show most.

    Raises ShardcError with the line of the registration: notation that cannot be read or does not fit the op's schema,
    or an op that already has a rule. Running the same line again (a module imported twice, a notebook cell) replaces
    its rule.
    """
    where = registry.caller(__file__)
    overload = resolve_op(op, where)
    examples = [as_sample(s, where) for s in samples]
    _check(overload, notation, linear, added, where)
    old = next(
        (o for o in RULES if o == overload or str(o) == str(overload)), None
    )  # an op defined again is another object
    if old is not None:
        if RULES[old].where != where:
            fault = f"{overload} already has the rule {RULES[old].text!r} ({RULES[old].where})"
            raise ShardcError(fault, where=where, fix="keep one of the two")
        del RULES[old]
        SAMPLES.pop(old, None)
    new = registry.rule(
        overload, notation, linear=linear, added=added, local=local, extra=extra, flops=flops, where=where
    )
    SAMPLES[overload] = examples
    return new


def resolve_op(op: Any, where: str) -> OpOverload:
    """Return the overload that a user means. Raises ShardcError for a Python function or a mutable op."""
    overload = overload_of(op)
    if overload is None:
        fix = (
            "pass the result of torch.library.custom_op, or torch.ops.mylib.myop.default; Python functions are traced "
            "through and need no rule"
        )
        raise ShardcError(f"{getattr(op, '__name__', op)!s} is not an op", where=where, fix=fix)
    if overload._schema.is_mutable:
        fix = "return what changed as a result, and copy it into the operand outside of the op"
        raise ShardcError(f"{overload} changes its operands", where=where, fix=fix)
    return overload


def _check(
    op: OpOverload, notation: str | SignatureOf, linear: str | LinearOf, added: tuple[int, ...], where: str
) -> None:
    """Check what can be checked without a call. Raises ShardcError with every mistake."""
    errors = Errors()
    parsed: Notation | None = None
    if isinstance(notation, str):
        try:
            parsed = parse(notation)
        except ValueError as e:
            errors.add(
                f"{op}: {e}", where=where, fix='write it like "... k+, n k+, n -> ... n": operands, an arrow, results'
            )
    tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
    lists = any("List" in str(a.type) for a in tensors)
    needed = [
        a for a in tensors if "Optional" not in str(a.type) and "List" not in str(a.type) and not a.has_default_value()
    ]
    count = len(parsed.inputs) if parsed else len(tensors)
    if parsed and not lists and not len(needed) <= len(parsed.inputs) <= len(tensors):
        operands = f"{len(tensors)} tensor operands ({', '.join(a.name for a in tensors)})"
        fix = "one part per tensor operand, in the order of the op's arguments, separated by commas"
        errors.add(f"{op} has {operands}, the rule {notation!r} has {len(parsed.inputs)}", where=where, fix=fix)
    returns = [r for r in op._schema.returns if "Tensor" in str(r.type)]
    if parsed and not any("List" in str(r.type) for r in returns) and len(parsed.outputs) != len(returns):
        fault = f"{op} has {len(returns)} results, the rule {notation!r} has {len(parsed.outputs)}"
        errors.add(fault, where=where, fix="one part per result after the arrow")
    groups: tuple[tuple[int, ...], ...] = ()
    if isinstance(linear, str):
        try:
            groups = registry.parse_linear(linear)
        except ValueError:
            fix = 'numbers of operands, groups separated by "|": "0 | 1", "0 2 | 1 2"'
            errors.add(f"{op}: linear={linear!r} cannot be read", where=where, fix=fix)
    for named, numbers in ((f"linear={linear!r}", {i for g in groups for i in g}), (f"added={added!r}", set(added))):
        for i in sorted(i for i in numbers if not 0 <= i < count and not lists):
            fault = f"{op}: {named} names operand {i}, there are {count}"
            errors.add(fault, where=where, fix="operands count from 0, tensors only")
    if added and parsed and not parsed.summed:
        fix = "mark the summed factor with +, or leave `added` out"
        errors.add(f"{op}: added={added!r}, but no factor of {notation!r} is summed", where=where, fix=fix)
    errors.raise_any()


def as_sample(given: Given, where: str = "") -> Sample:
    """Make a sample from a user's value; functions run with a fixed seed, and torch's state is restored."""
    if callable(given) and not isinstance(given, Tensor):

        def made(_: list[Tensor]) -> Arguments:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return _arguments(given(), where)

        return made
    fixed = _arguments(given, where)
    return lambda _: fixed


def _arguments(given: Any, where: str) -> Arguments:
    """Return (args, kwargs) of a call. Raises ShardcError for a value that is neither."""
    if isinstance(given, Tensor):
        return (given,), {}
    if not isinstance(given, tuple):
        fault = f"a sample is a {type(given).__name__}, not a tuple of arguments"
        raise ShardcError(fault, where=where, fix="samples=[lambda: (torch.randn(4, 12), torch.randn(12))]")
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given[0], given[1]
    return given, {}
