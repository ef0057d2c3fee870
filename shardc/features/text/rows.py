"""Make datasets of rows of tokens: of chats, with a loss on the assistant's tokens alone, and of documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from shardc.errors import ShardcError
from shardc.features.text.chat_masks import ChatTokens, Tokens
from shardc.features.text.packing import packed, row_of
from shardc.features.text.records import is_stream, records, texts

#: Documents that are packed at a time.
TOGETHER = 1024


def chats(
    source: Any,
    tokenizer: Any,
    seq: int,
    *,
    pack: bool = True,
    long: Literal["drop", "cut"] = "drop",
    window: int = TOGETHER,
    positions: bool = True,
) -> Rows | RowStream:
    """Return rows of conversations, with labels on what the assistant wrote, for data(split) and engine.loader.

    source: a .jsonl file, a list, a dataset or a stream of conversations: `messages` (role, content), `conversations`
    (from, value), or `prompt` and `completion`; `tools` and other keys go to the template. tokenizer: of transformers,
    or its folder. seq: tokens of a row. pack: several conversations a row, kept apart by position_ids; window: packed
    at a time. long: what becomes of a conversation of more than `seq` tokens. positions: rows have position_ids; a
    model that does not take them cannot part packed rows. Raises ShardcError for a conversation that it cannot mask.
    """
    tokenizer = loaded(tokenizer)
    tokens_of = ChatTokens(tokenizer)

    def documents(counts: Counter[str]) -> Iterator[Tokens]:
        for number, record in enumerate(records(source)):
            counts["read"] += 1
            ids, learned = tokens_of(record, f"conversation {number}")
            if len(ids) > seq:
                counts["long"] += 1
                if long == "drop":
                    continue
            if any(learned[1:seq]):
                yield ids[:seq], learned[:seq]
            else:
                counts["unlearned"] += 1

    form = Form("conversation", seq, pack, long, window, positions, pad_of(tokenizer))
    return form.rows(source, documents, (tokenizer.chat_template, len(tokenizer)))


def documents(
    source: Any, tokenizer: Any, seq: int, *, column: str = "text", pack: bool = True, window: int = TOGETHER
) -> Rows | RowStream:
    """Return rows of texts, each with the tokenizer's end token, for pretraining. Long texts are cut into pieces.

    source: a .jsonl file, a list, a dataset or a stream of texts, or of records with the text in `column`. Other
    arguments: as of `chats`.
    """
    tokenizer = loaded(tokenizer)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id

    def pieces(counts: Counter[str]) -> Iterator[Tokens]:
        for text, _ in texts(source, column):
            counts["read"] += 1
            ids = tokenizer(text)["input_ids"]
            if first is not None and ids[:2] == [first, first]:  # the text begins with it, and the tokenizer adds it
                ids = ids[1:]
            ids = ids if last is None or ids[-1:] == [last] else [*ids, last]
            counts["long"] += len(ids) > seq
            for begin in range(0, len(ids), seq):
                if len(piece := ids[begin : begin + seq]) > 1:
                    yield piece, [True] * len(piece)

    form = Form("document", seq, pack, "in pieces", window, True, pad_of(tokenizer))
    return form.rows(source, pieces, (column, len(tokenizer)))


def loaded(tokenizer: Any) -> Any:
    """Return a tokenizer of transformers, read from its folder if a path is given."""
    try:
        import transformers
    except ImportError:
        fix = "pip install 'shardc[text]'"
        raise ShardcError("shardc.text needs transformers", where="shardc.text", fix=fix) from None
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        return transformers.AutoTokenizer.from_pretrained(tokenizer)
    except Exception as e:  # any: of each tokenizer's own code
        fault = f"transformers cannot read a tokenizer from {tokenizer}: {str(e).splitlines()[0] if str(e) else e!r}"
        raise ShardcError(fault, where="tokenizer", fix="name a folder that tokenizer.save_pretrained wrote") from e


def pad_of(tokenizer: Any) -> int:
    """Return the id that fills rows. It is neither read by a document nor counted by the loss: any id will do."""
    return next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), 0)


def example(rows: int, seq: int) -> dict[str, Tensor]:
    """Return a batch of the form that `chats` and `documents` give, for batch() of a model file."""
    ids, place = torch.zeros(rows, seq, dtype=torch.int64), torch.arange(seq).expand(rows, seq).contiguous()
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": place}


class Form:
    """How documents become rows. kind: the name of a document, for people."""

    def __init__(self, kind: str, seq: int, pack: bool, long: str, window: int, positions: bool, pad: int) -> None:
        for name, number, least in (("seq", seq, 2), ("window", window, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ShardcError(f"{name} is {number!r}", where="shardc.text", fix=f"a whole number from {least} on")
        if long not in ("drop", "cut", "in pieces"):
            raise ShardcError(f"long is {long!r}", where="shardc.text", fix='long="drop" or long="cut"')
        if pack and not positions:
            fix = "pack=False: a model without position_ids reads over the end of a conversation"
            raise ShardcError("packed rows need positions", where="shardc.text", fix=fix)
        self.kind, self.seq, self.long, self.positions, self.pad = kind, seq, long, positions, pad
        self.window = window if pack else 1

    def rows(
        self, source: Any, documents: Callable[[Counter[str]], Iterator[Tokens]], settings: Any
    ) -> Rows | RowStream:
        return RowStream(self, source, documents, settings) if is_stream(source) else Rows(self, documents)

    def packed(self, documents: Iterator[Tokens]) -> Iterator[list[Tokens]]:
        return packed(documents, self.seq, self.window)

    def row(self, documents: list[Tokens]) -> dict[str, Tensor]:
        return row_of(documents, self.seq, self.pad, positions=self.positions)

    def counted(self, counts: Counter[str]) -> str:
        """Say what was read and what was left out."""
        then = {"drop": "left out", "cut": "cut"}.get(self.long, self.long)
        long = f"{counts['long']:,} of more than {self.seq} tokens {then}" if counts["long"] else ""
        none = f"{counts['unlearned']:,} with nothing to learn left out" if counts["unlearned"] else ""
        aside = ", ".join(filter(None, (long, none)))
        return f"{counts['read']:,} {self.kind}{'s' * (counts['read'] != 1)}{f' ({aside})' if aside else ''}"


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens, made when it is created. description: what was read, left out and packed; counts: in numbers.

    digest: of all tokens and labels; a resumed run compares it with its checkpoint's.
    """

    def __init__(self, form: Form, documents: Callable[[Counter[str]], Iterator[Tokens]]) -> None:
        self.counts: Counter[str] = Counter()
        self._form, ids, learned, lengths, rows = form, [], [], [], [0]
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
        digest = xxhash.xxh3_128(str((form.seq, form.pad, form.positions)).encode())
        for array in (self._ids, self._learned, self._rows, self._at):
            digest.update(array.tobytes())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        i = range(len(self))[i]
        cuts = [slice(*self._at[d : d + 2]) for d in range(self._rows[i], self._rows[i + 1])]
        return self._form.row([(self._ids[cut], self._learned[cut]) for cut in cuts])  # type: ignore[misc]

    @property
    def description(self) -> str:
        seq, n = self._form.seq, len(self)
        how, full = "packed into" if self._form.window > 1 else "in", len(self._ids) / (seq * n)
        return f"{self._form.counted(self.counts)}, {how} {n:,} row{'s' * (n != 1)} of {seq} ({full:.0%} full)"


class RowStream(IterableDataset[dict[str, Tensor]]):
    """The same of a source without a length. counts: of the last reading."""

    def __init__(
        self, form: Form, source: Any, documents: Callable[[Counter[str]], Iterator[Tokens]], settings: Any
    ) -> None:
        self._form, self._source, self._documents, self.counts = form, source, documents, Counter[str]()
        facts = (form.kind, form.seq, form.pad, form.long, form.window, form.positions, settings)
        self.digest = xxhash.xxh3_128(repr(facts).encode()).hexdigest()
        self.description = f"a stream of {form.kind}s, in rows of {form.seq}"

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.counts = Counter()
        yield from map(self._form.row, self._form.packed(self._documents(self.counts)))
