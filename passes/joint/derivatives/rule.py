"""What the derivative of a call is, however it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardc.passes.joint.derivatives.record import Line, Ref, Type

#: How a rule was found, or which part of one it is: see shardc.passes.joint.derivatives. "begun", "waited": of a
#: conversion beside a product; "product": the one or the other half of that product.
Kind = Literal["traced", "transposed", "opaque", "begun", "waited", "product"]


class Ask(NamedTuple):
    """What a rule is for. operands, tangents, before: types, of what the operands already have; wanted: which operands
    a gradient is asked for.
    """

    operands: tuple[Type, ...]
    tangents: tuple[Type | None, ...]
    before: tuple[Type | None, ...]
    wanted: tuple[bool, ...]

    def types(self, kind: str) -> Sequence[Type | None]:
        """Of the Refs of a kind that is no line's."""
        return {"x": self.operands, "g": self.tangents, "p": self.before}.get(kind, ())


@dataclass(frozen=True)
class Rule:
    """forward: what runs in place of the call; None: the call itself. results: where its results are then. backward:
    lines behind those of forward; grads: of each operand all that it has by now; None: nothing. types: of these.
    own: bytes of what an opaque op saves beside its operands and results.
    """

    forward: tuple[Line, ...] | None
    results: tuple[Ref, ...]
    backward: tuple[Line, ...]
    grads: tuple[Ref | None, ...]
    types: tuple[Type | None, ...]
    kind: Kind
    own: int = 0

    @cached_property
    def wants(self) -> tuple[Ref, ...]:
        """What its backward takes of forward: operands and results of the call, and what lines in its place make."""
        own = len(self.forward or ())
        refs = [r for line in self.backward for r in line.refs] + [r for r in self.grads if r is not None]
        return tuple(r for r in dict.fromkeys(refs) if r.kind in ("x", "y") or (r.kind == "t" and r.index < own))
