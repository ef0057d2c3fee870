"""List the assumptions of the proof, each with its test; docs/explanation/proof.md shows them.

A test fails if an op of the runtime has no definition that it is checked against, or if a row's test does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """Something that the proof assumes. name: in short; test: file, and test in it."""

    name: str
    sentence: str
    test: str


DEFINITIONS = "tests/runtime/ops/test_definitions.py::test_an_op_is_what_it_is_said_to_be"
ASSUMPTIONS = (
    Assumption(
        "rules of ops",
        "An op that its rule splits gives its part, or its summand, of what the whole op gives; so do its gradients.",
        "tests/rules/test_rules.py::test_rule_equals_the_whole_op_and_is_not_too_strict",
    ),
    Assumption(
        "finite padding",
        "An op that was tried on numbers is finite in padding that holds them, and so are its derivatives."
        " Padding does not overflow over many ops.",
        "tests/rules/test_finite_padding.py::test_every_elementwise_op_of_torch_is_finite_in_padding",
    ),
    Assumption(
        "conversions and their transposes",
        "A conversion makes of what ranks hold what its row says, and of the gradient what the transposed row says; at"
        " once, begun and waited for, and its transpose by itself.",
        DEFINITIONS,
    ),
    Assumption(
        "ops of the runtime",
        "Each gives the part, the maximum, or the summand of what it is defined to be on the whole, and of the"
        " gradient: losses on split classes, experts, random numbers, attention, numbers of 8 bits, gathers and sums of"
        " parameters, copies on the host.",
        DEFINITIONS,
    ),
    Assumption(
        "the model's graph",
        "The graph that was captured is the model: `compile` runs both on small numbers.",
        "tests/capture/test_capture.py::test_the_proof_names_what_differs",
    ),
    Assumption(
        "the runtime",
        "A rank runs the graph it has, sums buckets over the axes that they name, and keeps the schedule.",
        "tests/test_equal.py::test_loss_and_gradients_equal_one_device",
    ),
)


def short() -> str:
    """Return the names of the assumptions, as one line."""
    return f"assumed, each with its test (docs/explanation/proof.md): {', '.join(a.name for a in ASSUMPTIONS)}"
