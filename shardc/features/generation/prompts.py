"""Check the prompts of a generation, and pad prompts of several lengths to one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError


@dataclass(frozen=True)
class Prompts:
    """The prompts. ids: of each row, without padding. inputs: of an encoder, by name, if not ids.

    Dim 0 of inputs is rows. decoder: the ids that each row's decoder begins with, if set.
    """

    ids: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[str, Tensor], ...] = ()
    decoder: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, given: Any) -> Prompts:
        """Read lists of ids; i64[rows, length]; or {"input_ids": ..., "attention_mask": ...} of a tokenizer.

        For a model with an encoder also {"input_features": ..., "decoder_input_ids": ...} of its processor. Raises
        ShardcError for anything else, and for a prompt without a token.
        """
        mask, decoder, inputs = None, None, {}
        if isinstance(given, Mapping):
            mask, decoder = given.get("attention_mask"), given.get("decoder_input_ids")
            if "input_ids" not in given:
                inputs = {k: x for k, x in given.items() if isinstance(x, Tensor) and k != "decoder_input_ids"}
            given = given.get("input_ids")
        begun = tuple(map(_row, decoder)) if decoder is not None else ()
        if inputs:
            counts = {len(x) for x in inputs.values()}
            count = max(counts)
            if not count or len(counts) > 1 or len(begun) not in (0, count):
                raise ShardcError(
                    f"{', '.join(inputs)} have different numbers of rows, or none",
                    where="generate",
                    fix="pass every input of the encoder, and decoder_input_ids, for the same rows",
                )
            return cls(((),) * count, tuple(inputs.items()), begun)
        rows = [_row(x) for x in given] if isinstance(given, (Tensor, Sequence)) and len(given) else []
        if mask is not None:
            rows = [
                tuple(t for t, m in zip(r, k, strict=True) if m) for r, k in zip(rows, map(_row, mask), strict=True)
            ]
        if not rows or not all(rows):
            which = f"prompt {rows.index(())} has no token" if rows else "there is no prompt"
            raise ShardcError(which, where="generate", fix="pass lists of token ids, at least one id in each")
        return cls(tuple(rows), decoder=begun)

    def for_decoder(self, start: int | None) -> Prompts:
        """Return the start of the decoder. Raises ShardcError if it is unknown, or has several lengths.

        A decoder has no padding.
        """
        begun = self.decoder
        if not begun and start is not None:
            begun = ((start,),) * len(self.ids)
        if not begun:
            fault = "the model's configuration has no decoder_start_token_id"
            raise ShardcError(fault, where="generate", fix='pass "decoder_input_ids": one list of ids for each row')
        if len(begun) != len(self.ids) or len({len(row) for row in begun}) > 1 or not all(begun):
            fault = f"decoder_input_ids of {len(begun)} rows and {sorted({len(row) for row in begun})} tokens"
            raise ShardcError(fault, where="generate", fix="pass equally many for each row, or make several calls")
        return Prompts(begun)

    def for_encoder(self, rows: int, multiple: int) -> dict[str, Tensor]:
        """Return its inputs, ids right-padded to a multiple, with a mask. Extra rows repeat the first."""
        if self.inputs:
            every = torch.arange(rows) % len(self.ids)
            return {name: x[torch.where(torch.arange(rows) < len(self.ids), every, 0)] for name, x in self.inputs}
        length = -(-self.longest // multiple) * multiple
        ids, lengths = self.right_padded(rows, length)
        return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))

    def left_padded(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return (ids, mask), i64[rows, length], padded on the left. Extra rows repeat the first."""
        ids, mask = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64)
        for i in range(rows):
            row = self.ids[i if i < len(self.ids) else 0]
            ids[i, length - len(row) :] = torch.tensor(row)
            mask[i, length - len(row) :] = 1
        return ids, mask

    def right_padded(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return (ids i64[rows, length], padded on the right, lengths i64[rows])."""
        ids, mask = self.left_padded(rows, length)
        lengths = mask.sum(1)
        for i in range(rows):
            ids[i] = ids[i].roll(int(lengths[i]))
        return ids, lengths


def _row(x: Any) -> tuple[int, ...]:
    if isinstance(x, Tensor):
        x = x.tolist()
    ids = tuple(x) if isinstance(x, Iterable) else ()
    if isinstance(x, str) or not isinstance(x, Iterable) or not all(isinstance(t, int) for t in ids):
        fault = f"a prompt is a {type(x).__name__}, not a list of token ids"
        raise ShardcError(fault, where="generate", fix="pass the ids of each prompt: tokenizer(texts)")
    return ids
