"""What a plan has to know of a model besides its dry runs, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.plan.space import Layers

#: Units of layers, enough to see what each adds: stages of one (the first), one, two, and one (the last).
UNITS = 5


@dataclass(frozen=True)
class Facts:
    """Of the example batch: its rows, and tokens of each (None: its inputs have no sequence dim in common).

    Of the model: its list of layers, if it is long enough to be shortened; the dtype of its weights, "float32";
    carried: whether it has a plan for tensor parallelism of its own.

    Of its graph, for specs: regions, sequences, experts: patterns of modules; number: of experts; cuts: stages that a
    pipeline may have; inputs: `batch: {dims: ...}`.
    """

    rows: int
    sequence: int | None
    layers: Layers | None
    dtype: str
    carried: bool
    regions: Sequence[str]
    sequences: Sequence[str]
    experts: Sequence[str]
    number: int
    cuts: int
    inputs: Mapping[str, int | None]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Facts:
        """values: as `dataclasses.asdict` gives them."""
        return cls(**{**values, "layers": Layers(**values["layers"]) if values["layers"] else None})
