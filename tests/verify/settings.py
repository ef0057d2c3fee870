"""Models of the zoo, and specs that each is tried on: for the proof and for mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.passes.annotate import model_plan
from tests import zoo
from tests.zoo import hf, hf_more, plain, plain_gradients, plain_losses, plain_more  # noqa: F401 (they fill the zoo)

MICRO = {"batch": {"microbatches": 2}, "uneven": "pad"}
PIPE: dict[str, Any] = {"mesh": {"pp": 2}, **MICRO}
Check = dict[str, Any]


def settings(model: Any) -> dict[str, Check]:
    """By name, the specs that a model is tried on."""
    split = "model" if model_plan.read(model) else "structure"
    two: Check = {"mesh": {"dp": 2}}
    both: Check = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": split}}
    zero = {z: {"data": {"zero": z, "bucket_mb": 0.01}} for z in (1, 2, 3)}
    return {
        "dp=2": two,
        "dp=3, padded": {"mesh": {"dp": 3}, "uneven": "pad"},
        "dp=2, tp=2": both,
        "dp=2, tp=2, zero 1, 2 microbatches": both | zero[1] | MICRO,
        "dp=2, zero 2, 2 microbatches": two | zero[2] | MICRO,
        "dp=2, zero 3, 2 microbatches": two | zero[3] | MICRO,
        "dp=2, zero 3, recomputed": two | zero[3] | {"checkpoint": [{"match": "*", "save": []}]},
        "dp=2, tp=2, zero 3, recompute cheap": both | zero[3] | {"checkpoint": [{"match": "*", "recompute": "cheap"}]},
        "dp=2, recomputed, offload": two | {"checkpoint": [{"match": "*", "save": ["linear"], "offload": "cpu"}]},
        "dp=2, bfloat16": two | {"precision": {"compute": "bfloat16"}},
        "pp=2, 1f1b": PIPE | {"pipeline": {"axis": "pp", "stages": 2, "schedule": "1f1b"}},
        "pp=2, interleaved": PIPE | {"pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"}},
        "pp=2, zb-h1": PIPE | {"pipeline": {"axis": "pp", "stages": 2, "schedule": "zb-h1"}},
        "pp=2, dp=2, zb-v, zero 3": PIPE
        | {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"}}
        | zero[3],
    }


def builders() -> dict[str, Callable[[], zoo.Built]]:
    """Every model of the zoo, by name."""
    families = hf.FAMILIES | hf_more.FAMILIES
    return zoo.ALL | plain.ALL | {n: lambda family=family: hf.build(family) for n, family in families.items()}  # type: ignore[misc]
