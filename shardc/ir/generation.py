"""The two programs by which a language model generates: of prompts, and of one token with what the model keeps of those
before it. Of a model that keeps nothing, one of whole sequences.

    Prefill   ids [B, P]                  -> logits [B, V] of the last position, and the model's states
    Decode    ids [B, 1], place, states   -> logits [B, V]; states are written to
    Whole     ids [B, N], at [B]          -> logits [B, V] of the positions `at`

A model with an encoder is given its inputs besides; ids are the decoder's. The encoder runs with the prompts alone:
keys and values of what it gives are states that no token changes, and a token is given their mask.

States are the tensors in a model's own cache, whatever they are: keys and values [B, H, N, D] of a fixed length N (of
a layer that reads no further back than a window of W places, W of them), the last inputs of a convolution, the states
of a recurrence. Prompts are filled up on their left to a common length, so that a token's place is one number for all
rows: distances, and with them windows and biases, are the model's own.

A model that takes its place from the number of keys (GPT-Neo, MPT) is right where a token is always the last of them:
then keys and values move up by one for each, and there is no `place`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardc.ir.placement import Layout

if TYPE_CHECKING:
    from shardc.ir.program import Program

#: The output that has the logits of the next token; the input of `Decode` that says where its token stands.
LOGITS, PLACE = "logits", "place"
#: The inputs of `Whole`.
IDS, AT = "ids", "at"
#: The input of all three that has an encoder's, by name; that which says what of them is padding.
ENCODER, MASK = "encoder", "attention_mask"
_CACHE = "cache"


@dataclass(frozen=True)
class State:
    """One tensor of a cache. path: where it stands there, as "0.keys" of the first layer. shape: dim 0 is rows."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def output(self) -> str:
        """Its name among the outputs of `Prefill`."""
        return f"{_CACHE}.{self.path}"

    @property
    def buffer(self) -> str:
        """Its name among the buffers of `Decode`."""
        return self.output.replace(".", "_")

    @classmethod
    def of_output(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> State | None:
        """What an output of `Prefill` is of the cache; None of others."""
        first, _, path = name.partition(".")
        return cls(path, shape, dtype) if first == _CACHE else None


@dataclass(eq=False)
class Form:
    """A model's cache without its tensors, as its prompts have left it: what tracing `Prefill` writes here, tracing
    `Decode` fills in. slots: what stands there for the tensor of each path. encoder: the shape of what an encoder gave.
    """

    cache: Any = None
    slots: dict[str, object] = field(default_factory=dict)
    encoder: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Whole:
    """The forward of whole sequences, filled up on their right, which a causal model does not see."""


@dataclass(frozen=True)
class Prefill:
    """The forward of prompts. length: of the cache that it begins; form: of it, once this is traced; moves: for a token
    all keys and values move up by one; layouts: how `Decode` has them, by output.
    """

    length: int
    form: Form
    moves: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class Decode:
    """The forward of one token a row. states: what it reads and writes; form: of their cache."""

    states: tuple[State, ...]
    form: Form


Step = Prefill | Decode | Whole


@dataclass(frozen=True)
class Sizes:
    """What is compiled for. rows; prompt, length: of prompts, and of the cache, in tokens; encoder: of its inputs, as
    (name, shape, dtype); moves: see Prefill.
    """

    rows: int
    prompt: int
    length: int
    encoder: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    moves: bool = False


@dataclass(frozen=True)
class Begins:
    """How a model's own configuration says that texts begin and end. encodes: whether it has an encoder; start: the
    token that its decoder begins with; stop: those after which a text ends.
    """

    encodes: bool
    start: int | None
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """How a model generates. steps: its programs of prompts and of one token; None where it keeps no cache (`why`).
    trial: with an encoder, the program of prompts that are a token longer.
    """

    steps: tuple[Program, Program] | None
    trial: Program | None = None
    why: str = ""
