"""Define the programs by which a language model generates, and the state that they keep.

With a cache there are two, of prompts and of one token; without one there is a single program of whole sequences:

    Prefill   ids [B, P]                  -> logits [B, V] of the last position, and the model's states
    Decode    ids [B, 1], place, states   -> logits [B, V]; states are updated
    Whole     ids [B, N], at [B]          -> logits [B, V] of the positions `at`

A model with an encoder also takes the encoder's inputs; ids are the decoder's. The encoder runs with the prompts only:
keys and values of its output are states that no token changes, and decoding a token takes their mask.

States are the tensors in the model's own cache: keys and values [B, H, N, D] of a fixed length N (W, in a layer with a
window of W positions), the last inputs of a convolution, the states of a recurrence. Prompts are padded on the left to
a common length, so that a token's position is one number for all rows; distances, windows and biases stay correct.

A model that derives the position from the number of keys (GPT-Neo, MPT) is right if a token is always the last key.
For such a model keys and values move up by one for each token, and there is no `place`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardc.ir.program import Program

#: The output with the logits of the next token; the input of `Decode` with the token's position.
LOGITS, PLACE = "logits", "place"
#: The inputs of `Whole`.
IDS, AT = "ids", "at"
#: The input of all three with the encoder's inputs by name; the entry that masks their padding.
ENCODER, MASK = "encoder", "attention_mask"
_CACHE = "cache"


@dataclass(frozen=True)
class State:
    """One tensor of a cache. path: its place there, "0.keys" of the first layer. shape: dim 0 is rows."""

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
        """Return the state that an output of `Prefill` holds; None if the output is not part of the cache."""
        first, _, path = name.partition(".")
        return cls(path, shape, dtype) if first == _CACHE else None


@dataclass(eq=False)
class Form:
    """A model's cache without its tensors. Tracing `Prefill` writes it, tracing `Decode` reads it.

    slots: the object in the place of each path's tensor. encoder: the shape of the encoder's output.
    """

    cache: Any = None
    slots: dict[str, object] = field(default_factory=dict)
    encoder: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes to compile for. rows: of a batch; prompt, length: of prompts and of the cache, in tokens.

    encoder: its inputs, as (name, shape, dtype); moves: see Prefill.
    """

    rows: int
    prompt: int
    length: int
    encoder: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    moves: bool = False


@dataclass(frozen=True)
class Begins:
    """How texts begin and end, by the model's own configuration. encodes: whether it has an encoder.

    start: the token that its decoder begins with; stop: tokens after which a text ends.
    """

    encodes: bool
    start: int | None
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """How a model generates. steps: its programs of prompts and of one token; None without a cache.

    why: the reason if there is none. trial: with an encoder, the program of prompts that are one token longer.
    """

    steps: tuple[Program, Program] | None
    trial: Program | None = None
    why: str = ""
