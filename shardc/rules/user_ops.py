"""Rules of users' ops: registered with all mistakes told by place, and proven as shardc's own are.

@torch.library.custom_op("mylib::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor: ...

shardc.rule(scale, "... d, d -> ... d", linear="0 | 1", samples=[lambda: (torch.randn(4, 12), torch.randn(12))])

def test_scale():
    shardc.check_rule(scale)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shardc.errors import Errors, ShardcError
from shardc.rules import registry
from shardc.rules.notation import Notation, parse
from shardc.rules.registry import RULES, Call, ExtraOf, LocalOf, Rule, SignatureOf
from shardc.rules.samples.make import SAMPLES
from shardc.rules.samples.own import Given, as_sample
from shardc.torch_private import OpOverload, overload_of

if TYPE_CHECKING:
    from shardc.verify.rules import Finding


def rule(
    op: Any,
    notation: str | SignatureOf,
    *,
    linear: str | Callable[[Call], str] = "",
    added: tuple[int, ...] = (),
    local: LocalOf | None = None,
    extra: ExtraOf | None = None,
    flops: Callable[[Call], int] | None = None,
    samples: Iterable[Given] = (),
) -> Rule:
    """Say what may be split in an op of yours, so that graphs with it can be sharded. One line, once, where the op is
    defined.

    >>> shardc.rule(scale, "... d, d -> ... d", linear="0 | 1", samples=[lambda: (torch.randn(4, 12), torch.randn(12))])

    op: what `torch.library.custom_op` or `triton_op` returned, `torch.ops.mylib.scale`, or one overload of it
    (`.default`).
    notation: tensor operands, an arrow, results; a name per dim, the same name where sizes are one. `k+` is summed away
    (splitting it leaves partial sums), `k!` must stay whole, `...` is any leading dims, `(a b)` one dim of two factors.
    Or a function of the `Call`.
    linear: operands in which the op is linear, so that a partial sum may pass: "0 | 1" in each alone, "0 1" in both
    together.
    added: operands that are added once: they become partial when a summed factor is split (a bias).
    local, extra, flops: see shardc.rules.registry.
    samples: calls that prove it: tuples of arguments, or functions that return one. Dims of 12 show most.

    Raises ShardcError with the line of the registration: notation that cannot be read or does not fit the op's schema,
    an op that has a rule already. The same line run again (a module imported twice, a notebook's cell) replaces its
    rule."""
    where = registry.caller(__file__)
    overload = _overload(op, where)
    given = [as_sample(s, where) for s in samples]
    _check(overload, notation, linear, added, where)
    old = next(
        (o for o in RULES if o == overload or str(o) == str(overload)), None
    )  # an op defined again is another object
    if old is not None:
        if RULES[old].where != where:
            what = f"{overload} already has the rule {RULES[old].text!r} ({RULES[old].where})"
            raise ShardcError(what, where=where, fix="keep one of the two")
        del RULES[old]
        SAMPLES.pop(old, None)
    new = registry.rule(
        overload, notation, linear=linear, added=added, local=local, extra=extra, flops=flops, where=where
    )
    SAMPLES[overload] = given
    return new


def check_rule(op: Any, *args: Any, **kwargs: Any) -> list[Finding]:
    """Prove the rule of an op: on this call (the op's own arguments), or on the samples that the rule was registered
    with.

    The whole op is compared with 2, 3, 4 and 6 parts at every factor, partial sums, two splits at once: results and
    gradients, in float64 (1e-10 of the largest number) where the op takes it, in float32 (1e-5) and bfloat16 (5e-2),
    with operands transposed in memory, with factors of size one. Runs on the CPU in well under a second per call.

    Returns what the rule forbids though it comes out right (a hint, no fault). Raises ShardcError that lists everything
    that is wrong."""
    from shardc.verify.rules import check_op

    where = registry.caller(__file__)
    overload = _overload(op, where)
    found = registry.find(overload)
    if found is None:
        raise ShardcError(
            f"{overload} has no rule", where=where, fix=f"shardc.rule({overload}, ...) where the op is defined"
        )
    samples = [as_sample((args, kwargs), where)] if args or kwargs else SAMPLES.get(overload, [])
    if not samples:
        fix = "shardc.check_rule(op, *arguments), or shardc.rule(..., samples=[...])"
        raise ShardcError(f"there is no call of {overload} to check", where=where, fix=fix)
    errors = Errors()
    report = check_op(overload, samples)
    for f in report.wrong:
        errors.add(str(f), where=found.where, fix=_fix(f))
    errors.raise_any()
    return report.strict


def _fix(finding: Finding) -> str:
    if finding.strategy.startswith("replicate"):
        return (
            "the op gives other results when it is called again: rules are of ops without randomness and without state"
        )
    if finding.strategy.startswith("split"):
        name = finding.strategy.split()[1].partition("/")[0].rstrip(",")
        return f"mark {name}! (whole), or {name}+ if it is summed; `local` can change a rank's call"
    if finding.strategy.startswith("partial"):
        return "take the operands out of `linear`: the op is not linear in them"
    if "no call of the op" in finding.what:
        return "give the op's own arguments, one by one: check_rule(op, x, w)"
    return "make the notation fit this call"


def _overload(op: Any, where: str) -> OpOverload:
    found = overload_of(op)
    if found is None:
        fix = (
            "give what torch.library.custom_op returned, or torch.ops.mylib.myop.default; Python functions are traced"
            " through, they need no rule"
        )
        raise ShardcError(f"{getattr(op, '__name__', op)!s} is no op", where=where, fix=fix)
    if found._schema.is_mutable:
        fix = "return what changed as a result, and copy it into the operand outside of the op"
        raise ShardcError(f"{found} changes its operands", where=where, fix=fix)
    return found


def _check(
    op: OpOverload, notation: str | SignatureOf, linear: str | Callable[[Call], str], added: tuple[int, ...], where: str
) -> None:
    """All that can be known to be wrong without a call. Raises ShardcError with every mistake."""
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
        what = (
            f"{op} has {len(tensors)} tensor operands ({', '.join(a.name for a in tensors)}), the rule {notation!r} has"
            f" {len(parsed.inputs)}"
        )
        errors.add(
            what,
            where=where,
            fix="one part per tensor operand, in the order of the op's arguments, separated by commas",
        )
    returns = [r for r in op._schema.returns if "Tensor" in str(r.type)]
    if parsed and not any("List" in str(r.type) for r in returns) and len(parsed.outputs) != len(returns):
        what = f"{op} has {len(returns)} results, the rule {notation!r} has {len(parsed.outputs)}"
        errors.add(what, where=where, fix="one part per result after the arrow")
    if isinstance(linear, str):
        try:
            groups = registry.parse_linear(linear)
        except ValueError:
            groups = ()
            fix = 'numbers of operands, groups separated by "|": "0 | 1", "0 2 | 1 2"'
            errors.add(f"{op}: linear={linear!r} cannot be read", where=where, fix=fix)
        for i in sorted({i for g in groups for i in g if not 0 <= i < count and not lists}):
            errors.add(
                f"{op}: linear={linear!r} names operand {i}, there are {count}",
                where=where,
                fix="operands count from 0, tensors only",
            )
    for i in added:
        if not 0 <= i < count and not lists:
            errors.add(
                f"{op}: added={added!r} names operand {i}, there are {count}",
                where=where,
                fix="operands count from 0, tensors only",
            )
    if added and parsed and not parsed.summed:
        fix = "mark the summed factor with +, or leave `added` out"
        errors.add(f"{op}: added={added!r}, but no factor of {notation!r} is summed", where=where, fix=fix)
    errors.raise_any()
