"""The data of `shardc run hf:DIR --data chats.jsonl`: conversations, with the tokenizer of the model's folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from shardc.features.text.records import read
from shardc.features.text.rows import chats, example, loaded


def chats_of(folder: Path, on_meta: Callable[[], nn.Module], file: str, batch: int, seq: int) -> dict[str, Any]:
    """Return data(split) and an example batch, for a model of transformers with its tokenizer in `folder`.

    Raises ShardcError if the file or the tokenizer cannot be read. A model without position_ids, which cannot part
    conversations in a row, gets one in each.
    """
    tokenizer, read_once = loaded(folder), read(file)
    positions = "position_ids" in inspect.signature(on_meta().forward).parameters

    def data(split: str) -> Any:
        if split != "train":
            return None
        return chats(read_once, tokenizer, seq, pack=positions, positions=positions)

    form = example(batch, seq)
    return {"data": data, "batch": form if positions else {k: x for k, x in form.items() if k != "position_ids"}}
