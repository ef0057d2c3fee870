"""Make datasets of rows of tokens: of chats, with a loss on the assistant's tokens alone, and of documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from shardc.errors import ShardcError
from shardc.features.text.chat_masks import ChatTokens, Tokens
from shardc.features.text.packing import TOGETHER, Form
from shardc.features.text.records import is_stream, placed, read, text_of
from shardc.optional import library

#: Of so many conversations of a file, `shardc run --data` holds out one, as `shardc init` writes it.
HELD_OUT = 20
#: The most tokens of a row, where nobody names a number.
TOKENS = 1024
Documents = Callable[["Counter[str]"], Iterator[Tokens]]  # reads them, and counts what was read and left out


def chats(
    source: Any,
    tokenizer: Any,
    seq: int,
    *,
    pack: bool = True,
    long: Literal["drop", "cut"] = "drop",
    window: int = TOGETHER,
    positions: bool = True,
    fill: bool = True,
) -> Rows | RowStream:
    """Return rows of conversations, with labels on what the assistant wrote, for data(split) and engine.loader.

    source: a .jsonl file, a list, a dataset or a stream of conversations: `messages` (role, content), `conversations`
    (from, value), or `prompt` and `completion`; `tools` and other keys go to the template. tokenizer: of transformers,
    or its folder. seq: tokens of a row. pack: several conversations a row, kept apart by position_ids; window: packed
    at a time. long: what becomes of a conversation of more than `seq` tokens. positions: rows have position_ids; a
    model that does not take them cannot part packed rows. fill: pad each row to `seq`; else `batch: {pad}` of the spec
    pads rows. Raises ShardcError for a conversation that it cannot mask.
    """
    tokenizer = loaded(tokenizer)
    form = Form("conversation", seq, long, window if pack else 1, positions, pad_of(tokenizer), fill)
    read_by = partial(_conversations, source, ChatTokens(tokenizer), form)
    return _rows(form, source, read_by, (tokenizer.chat_template, len(tokenizer)), tokenizer)


def documents(
    source: Any,
    tokenizer: Any,
    seq: int,
    *,
    column: str = "text",
    pack: bool = True,
    window: int = TOGETHER,
    positions: bool = True,
) -> Rows | RowStream:
    """Return rows of texts, each with the tokenizer's end token, for pretraining. Long texts are cut into pieces.

    source: a .jsonl file, a list, a dataset or a stream of texts, or of records with the text in `column`. Other
    arguments: as of `chats`.
    """
    tokenizer = loaded(tokenizer)
    form = Form("document", seq, "in pieces", window if pack else 1, positions, pad_of(tokenizer))
    return _rows(form, source, partial(_pieces, source, tokenizer, form, column), (column, len(tokenizer)), tokenizer)


def longest(config: Path) -> int:
    """Return the tokens of a row for a model of transformers, if nobody names a number. config: its config.json."""
    values = json.loads(config.read_text())
    return min(TOKENS, int(values.get("max_position_embeddings") or values.get("n_positions") or TOKENS))


def loaded_for(config: Path) -> Any:
    """Return the tokenizer beside a model's config.json. Raises ShardcError if it has tokens that the model has not."""
    tokenizer, values = loaded(config.parent), json.loads(config.read_text())
    rows = values.get("vocab_size") or (values.get("text_config") or {}).get("vocab_size")
    if rows and len(tokenizer) > rows:
        fault = f"the tokenizer has {len(tokenizer):,} tokens, and the model's table {rows:,} rows"
        fix = "use the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer)), and save the folder"
        raise ShardcError(fault, where=str(config.parent), fix=fix)
    return tokenizer


def chats_of(config: Path, file: str, batch: int, seq: int | None, *, positions: bool) -> dict[str, Any]:
    """Return data(split) and an example batch, of a file of conversations, for a model of transformers.

    config: its config.json, beside the tokenizer. seq: tokens of a row; None: `longest`. positions: whether it takes
    position_ids; else it cannot part conversations in a row, and gets one in each.
    """
    tokenizer, every, seq = loaded_for(config), read(file), seq or longest(config)
    parts = {"valid": every[: len(every) // HELD_OUT], "train": every[len(every) // HELD_OUT :]}

    def data(split: str) -> Any:
        records = parts.get(split)
        return chats(records, tokenizer, seq, pack=positions, positions=positions) if records else None

    return {"data": data, "batch": example(batch, seq, positions=positions)}


def loaded(tokenizer: Any) -> Any:
    """Return a tokenizer of transformers, read from its folder if a path is given."""
    transformers = library("transformers", "shardc.text")
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        return transformers.AutoTokenizer.from_pretrained(tokenizer)
    except Exception as e:  # any: of each tokenizer's own code
        fault = f"transformers cannot read a tokenizer from {tokenizer}: {str(e).splitlines()[0] if str(e) else e!r}"
        raise ShardcError(fault, where="tokenizer", fix="name a folder that tokenizer.save_pretrained wrote") from e


def pad_of(tokenizer: Any) -> int:
    """Return the id that fills rows. No document reads it and the loss does not count it: any id will do."""
    return next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), 0)


def example(rows: int, seq: int, *, positions: bool = True) -> dict[str, Tensor]:
    """Return a batch of the form that `chats` and `documents` give, for batch() of a model file."""
    # positions restart, so that compile notes a model that does not part what is packed into a row
    ids, place = torch.zeros(rows, seq, dtype=torch.int64), (torch.arange(seq) % -(-seq // 2)).repeat(rows, 1)
    return {"input_ids": ids, "labels": ids.clone()} | ({"position_ids": place} if positions else {})


# Functions at the top level: a DataLoader's workers get them in a stream, also those that start as new processes.
def _conversations(source: Any, tokens_of: ChatTokens, form: Form, counts: Counter[str]) -> Iterator[Tokens]:
    for record, place in placed(source, "conversation"):
        ids, learned = tokens_of(record, place)
        counts.update(read=1, long=len(ids) > form.seq)
        if len(ids) <= form.seq or form.long == "cut":
            if any(learned[1 : form.seq]):
                yield ids[: form.seq], learned[: form.seq]
            else:
                counts["unlearned"] += 1


def _pieces(source: Any, tokenizer: Any, form: Form, column: str, counts: Counter[str]) -> Iterator[Tokens]:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    for record, place in placed(source, "record"):
        ids = tokenizer(text_of(record, column, place))["input_ids"]
        if begin is not None and ids[:2] == [begin, begin]:  # the text begins with it, and the tokenizer adds it
            ids = ids[1:]
        ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
        counts.update(read=1, long=len(ids) > form.seq)
        for piece in (ids[at : at + form.seq] for at in range(0, len(ids), form.seq)):
            if len(piece) > 1:
                yield piece, [True] * len(piece)


def _rows(form: Form, source: Any, documents: Documents, settings: Any, tokenizer: Any) -> Rows | RowStream:
    stream = is_stream(source)
    return RowStream(form, source, documents, settings, tokenizer) if stream else Rows(form, documents, tokenizer)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens, made when it is created. summary: what was read, left out and packed; counts: in numbers.

    digest: of all tokens and labels; a resumed run compares it with its checkpoint's. tokenizer: a run saves it.
    """

    def __init__(self, form: Form, documents: Documents, tokenizer: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.tokenizer, self._form, ids, learned, lengths, rows = tokenizer, form, [], [], [], [0]
        for row in form.packed(documents(self.counts)):
            for tokens, mask in row:
                ids.append(np.asarray(tokens, np.int32))
                learned.append(np.asarray(mask, np.bool_))
                lengths.append(len(tokens))
            rows.append(len(lengths))
        if not lengths:
            fix = "raise seq, or long='cut'" if self.counts["long"] else "give some with an assistant's text"
            raise ShardcError(f"no row is left of {form.counted(self.counts)}", where="shardc.text", fix=fix)
        self._ids, self._learned = np.concatenate(ids), np.concatenate(learned)
        self._rows, self._at = np.asarray(rows), np.concatenate([[0], np.cumsum(lengths)])
        digest = xxhash.xxh3_128(repr((form.seq, form.pad, form.positions)).encode())
        for array in (self._ids, self._learned, self._rows, self._at):
            digest.update(array.tobytes())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        i = range(len(self))[i]
        cuts = [slice(*self._at[d : d + 2]) for d in range(self._rows[i], self._rows[i + 1])]
        return self._form.row([(self._ids[cut], self._learned[cut]) for cut in cuts])

    @property
    def lengths(self) -> list[list[int]]:
        """The tokens of each document of each row; what fills a row up is one more."""
        rows = [np.diff(self._at[a : b + 1]).tolist() for a, b in pairwise(self._rows)]
        return [
            [*row, self._form.seq - sum(row)] if self._form.fill and sum(row) < self._form.seq else row for row in rows
        ]

    @property
    def summary(self) -> str:
        seq, n, full = self._form.seq, len(self), len(self._ids) / (self._form.seq * len(self))
        how = "packed into" if self._form.window > 1 else "in"
        if not self._form.fill:
            return f"{self._form.counted(self.counts)}, {how} {n:,} row{'s' * (n != 1)} of up to {seq}"
        return f"{self._form.counted(self.counts)}, {how} {n:,} row{'s' * (n != 1)} of {seq} ({full:.0%} full)"


class RowStream(IterableDataset[dict[str, Tensor]]):
    """The same of a source without a length. counts: of the last reading; digest: of the settings."""

    def __init__(self, form: Form, source: Any, documents: Documents, settings: Any, tokenizer: Any) -> None:
        self._form, self._source, self._documents, self.counts = form, source, documents, Counter[str]()
        self.tokenizer = tokenizer
        self.digest = xxhash.xxh3_128(repr((form, settings)).encode()).hexdigest()
        self.summary = f"a stream of {form.kind}s, in rows of {form.seq}"

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.counts = Counter()
        return map(self._form.row, self._form.packed(self._documents(self.counts)))
