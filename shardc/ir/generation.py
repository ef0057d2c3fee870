"""The two programs by which a language model generates: of prompts, and of one token with the keys and values of those
before it. Of a model that keeps none, one of whole sequences.

    Prefill   ids [B, P]                         -> logits [B, V] of the last position, keys and values [B, H, N, D]
    Decode    ids [B, 1], place, keys, values    -> logits [B, V]; keys and values are written to at `place`
    Whole     ids [B, N], at [B]                 -> logits [B, V] of the positions `at`

Keys and values are a *cache* of a fixed length N. Prompts are filled up on their left to a common length, so that a
token's place in the cache is one number for all rows: distances, and with them windows and biases, are the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardc.ir.placement import Layout

if TYPE_CHECKING:
    from shardc.ir.program import Program

#: The output that has the logits of the next token; the input of `Decode` that says where its token stands.
LOGITS, PLACE = "logits", "place"
#: The inputs of `Whole`.
IDS, AT = "ids", "at"
_CACHE = "cache"


@dataclass(frozen=True)
class State:
    """One tensor of a cache: the keys, or the values, of one layer. shape: [rows, heads, length, size of a head]."""

    layer: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def output(self) -> str:
        """Its name among the outputs of `Prefill`."""
        return f"{_CACHE}.{self.layer}.{self.kind}"

    @property
    def buffer(self) -> str:
        """Its name among the buffers of `Decode`."""
        return f"{_CACHE}_{self.layer}_{self.kind}"

    @classmethod
    def of_output(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> State | None:
        """What an output of `Prefill` is of the cache; None of others."""
        first, *rest = name.split(".")
        return cls(int(rest[0]), rest[1], shape, dtype) if first == _CACHE else None


@dataclass(frozen=True)
class Whole:
    """The forward of whole sequences, filled up on their right, which a causal model does not see."""


@dataclass(frozen=True)
class Prefill:
    """The forward of prompts. length: of the cache that it begins; layouts: how `Decode` has that, by output."""

    length: int
    layouts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class Decode:
    """The forward of one token a row. states: the cache that it reads and writes."""

    states: tuple[State, ...]


Step = Prefill | Decode | Whole


@dataclass(frozen=True)
class Generation:
    """How a model generates. steps: its programs of prompts and of one token; None where it keeps no cache (`why`).
    stop: the tokens after which the model's own configuration ends.
    """

    steps: tuple[Program, Program] | None
    stop: tuple[int, ...] = ()
    why: str = ""
