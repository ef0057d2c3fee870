"""What the proof assumes, each with the test that checks it: the proof's output says in short what this is, and
docs/explanation/proof.md shows it as `python -m shardc.verify.static.assumptions` prints it.

A test fails where an op of the runtime is in no row, or where a row's test is not there
(tests/verify/test_assumptions.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardc.ir.conversions import BY_OP


@dataclass(frozen=True)
class Assumption:
    """One thing that the proof takes for true. name: in short; test: file, and test in it; ops: of shardc.runtime.ops,
    of which it is said.
    """

    name: str
    sentence: str
    test: str
    ops: tuple[str, ...] = ()


DEFINITIONS = "tests/runtime/ops/test_definitions.py::test_an_op_is_what_it_is_said_to_be"
ASSUMPTIONS = (
    Assumption(
        "rules of ops",
        "An op that its rule splits gives its part, or its summand, of what the whole op gives; so do its gradients.",
        "tests/rules/test_rules.py::test_rule_equals_the_whole_op_and_is_not_too_strict",
    ),
    Assumption(
        "finite padding",
        "An op that was tried on numbers is finite in padding that holds them, and so are its derivatives.",
        "tests/rules/test_finite_padding.py::test_every_elementwise_op_of_torch_is_finite_in_padding",
    ),
    Assumption(
        "conversions and their transposes",
        "A conversion makes of what ranks hold what its row says, and of the gradient what the transposed row says; at"
        " once, begun and waited for, and its transpose by itself.",
        DEFINITIONS,
        (*BY_OP, "start", "wait", "transpose", "transpose_start"),
    ),
    Assumption(
        "ops on parts of a dim",
        "Each gives the part, the maximum, or the summand of what it is on the whole dim, and of the gradient.",
        DEFINITIONS,
        (
            *("all_reduce_max", "fill_padding", "embedding_partial", "select_partial", "gather_partial", "cumsum"),
            *("conv1d", "partial_mean", "largest", "sum_exp", "log_sum", "experts_keep", "top", "ties", "extremum"),
        ),
    ),
    Assumption(
        "losses on split classes",
        "Parts of a cross entropy, also of a linear layer in chunks of rows, add up to that of all classes.",
        DEFINITIONS,
        ("nll", "nll_max", "nll_parts", "nll_join", "linear_nll", "nll_top", "nll_exp", "nll_alone"),
    ),
    Assumption(
        "experts",
        "Tokens that are sent to experts of other ranks and back come out as from a loop over all experts.",
        DEFINITIONS,
        ("experts", "experts_route", "experts_send", "experts_apply", "experts_return", "experts_combine"),
    ),
    Assumption(
        "random numbers",
        "A rank draws, and drops, at its places what one device has there.",
        DEFINITIONS,
        ("dropout", "random"),
    ),
    Assumption(
        "sums and copies of a step",
        "Sums over microbatches, a weight's copy in another dtype, and the statistics of a mode are the step's.",
        DEFINITIONS,
        ("total", "summed", "cast_once", "batch_stat", "add_into"),
    ),
    Assumption(
        "attention",
        "Attention of a part of the queries or heads is that part of it, also with dropout; which keys the queries of a"
        " rank reach is known to all.",
        DEFINITIONS,
        ("attention", "attention_reach"),
    ),
    Assumption(
        "8 bits",
        "Numbers of a part are rounded as those of the whole, forward and backward.",
        DEFINITIONS,
        ("fp8_amax", "fp8_round", "fp8_grad", "fp8_round_grad"),
    ),
    Assumption(
        "products of 8 bits",
        "Products of rounded numbers are those of a part, or summands.",
        DEFINITIONS,
        ("fp8_linear", "fp8_pack", "fp8_grad_of_data", "fp8_grad_of_weight"),
    ),
    Assumption(
        "experts of 8 bits",
        "An expert of rounded numbers is two layers of them.",
        DEFINITIONS,
        ("fp8_experts", "fp8_experts_apply"),
    ),
    Assumption(
        "parameters in parts",
        "ZeRO's gathers give whole parameters, and what is scattered is the sum of all gradients.",
        DEFINITIONS,
        ("gather_start", "gather_wait", "updated"),
    ),
    Assumption(
        "lines of graphs",
        "An op with its backward as one op, gradients that are handed over, and gathers in backward are autograd's.",
        DEFINITIONS,
        ("opaque", "opaque_backward", "accumulate", "launch", "scatter", "regather_start", "regather_wait"),
    ),
    Assumption(
        "copies on the host",
        "What waits on the host comes back as it was.",
        DEFINITIONS,
        ("offload_start", "offload_wait", "reload_start", "reload_wait"),
    ),
    Assumption(
        "the model's graph",
        "The graph that was captured is the model: `compile` runs both on small numbers.",
        "tests/capture/test_capture.py::test_the_proof_names_what_differs",
    ),
    Assumption(
        "the runtime",
        "A rank runs the text it has, sums buckets over the axes that they name, and keeps the schedule.",
        "tests/test_equal.py::test_loss_and_gradients_equal_one_device",
    ),
)


def short() -> str:
    """In a line: what is assumed."""
    return f"assumed, each with its test (docs/explanation/proof.md): {', '.join(a.name for a in ASSUMPTIONS)}"


def markdown() -> str:
    """The table as docs/explanation/proof.md shows it."""
    lines = ["| assumed | of the runtime's ops | checked by |", "|---|---|---|"]
    for a in ASSUMPTIONS:
        ops = ", ".join(f"`{op}`" for op in a.ops)
        lines.append(f"| {a.name}: {a.sentence[0].lower()}{a.sentence[1:]} | {ops} | `{a.test}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
