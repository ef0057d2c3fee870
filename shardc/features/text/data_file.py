"""The data of `shardc run hf:DIR --data chats.jsonl`: conversations, with the tokenizer of the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardc.features.text.records import read
from shardc.features.text.rows import chats, example, loaded


def chats_of(folder: Path, file: str, batch: int, seq: int, *, positions: bool) -> dict[str, Any]:
    """Return data(split) and an example batch for a model of transformers.

    positions: whether it takes position_ids; else it cannot part conversations in a row, and gets one in each. Raises
    ShardcError if the file or the tokenizer cannot be read.
    """
    tokenizer, conversations = loaded(folder), read(file)

    def data(split: str) -> Any:
        train = split == "train"
        return chats(conversations, tokenizer, seq, pack=positions, positions=positions) if train else None

    return {"data": data, "batch": example(batch, seq, positions=positions)}
