"""Define what the derivative of a call is, however it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardc.passes.joint.derivatives.record import Line, Ref, Type

#: How a rule was found, or which part of it this is (shardc.passes.joint.derivatives). "begun", "waited": of a
#: conversion beside a product; "product": gradients of a product's input, of its weight and bias, or (8 bits) of both.
Kind = Literal["traced", "transposed", "opaque", "begun", "waited", "product"]


class Request(NamedTuple):
    """The types for which a rule is needed. operands, tangents; before: of the operands' gradients so far.

    wanted: which operands need a gradient.
    """

    operands: tuple[Type, ...]
    tangents: tuple[Type | None, ...]
    before: tuple[Type | None, ...]
    wanted: tuple[bool, ...]

    def types(self, kind: str) -> Sequence[Type | None]:
        """Return the types of the Refs of a kind that no line makes."""
        return {"x": self.operands, "g": self.tangents, "p": self.before}.get(kind, ())


@dataclass(frozen=True)
class Rule:
    """The derivative of a call. own: bytes that an opaque op saves beside operands and results.

    forward: lines that run in place of the call; None: the call itself. results: its results then. backward: lines
    after those of forward. grads: for each operand, the sum of its gradients up to here, or None. types: of grads.
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
        """The Refs that backward takes of forward: operands and results of the call, and results of its lines."""
        count = len(self.forward or ())
        refs = [r for line in self.backward for r in line.refs] + [r for r in self.grads if r is not None]
        return tuple(r for r in dict.fromkeys(refs) if r.kind in ("x", "y") or (r.kind == "t" and r.index < count))
