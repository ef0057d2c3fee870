"""Pack documents into rows of one length, by best fit decreasing within a window.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling". The window bounds what a stream keeps in memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.text.chat_masks import Tokens

#: Documents that are packed at a time.
TOGETHER = 1024


def best_fit(lengths: Sequence[int], seq: int) -> list[list[int]]:
    """Return the numbers of the documents of each row: the longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free places, row), in order
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(room, (lengths[i], -1))
        free, row = room.pop(at) if at < len(room) else (seq, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if free > lengths[i]:
            insort(room, (free - lengths[i], row))
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True)
class Form:
    """How documents become rows. kind: a document's name, for people. window: documents that are packed at a time.

    fill: all rows have `seq` tokens; else a row is as long as its documents.
    """

    kind: str
    seq: int
    long: str
    window: int
    positions: bool
    pad: int
    fill: bool = True

    def __post_init__(self) -> None:
        for name, least in (("seq", 2), ("window", 1)):
            if not isinstance(number := getattr(self, name), int) or number < least:
                raise ShardcError(f"{name} is {number!r}", where="shardc.text", fix=f"a whole number from {least} on")
        if self.long not in ("drop", "cut", "in pieces"):
            raise ShardcError(f"long is {self.long!r}", where="shardc.text", fix='long="drop" or long="cut"')
        if self.window > 1 and not self.positions:
            fix = "pack=False: a model without position_ids reads over the end of a conversation"
            raise ShardcError("packed rows need positions", where="shardc.text", fix=fix)

    def packed(self, documents: Iterator[Tokens]) -> Iterator[list[Tokens]]:
        """Yield the documents of each row."""
        while chunk := list(islice(documents, self.window)):
            for row in best_fit([len(ids) for ids, _ in chunk], self.seq):
                yield [chunk[i] for i in row]

    def row(self, documents: Iterable[tuple[Any, Any]]) -> dict[str, Tensor]:
        """Return a row: documents one after the other, and padding, which is a document of its own.

        Positions begin again with each document, by which attention keeps documents apart. The first token of a
        document is no label: what precedes it is another document. So a packed loss is that of each document alone.
        """
        documents = list(documents)
        seq = self.seq if self.fill else sum(len(tokens) for tokens, _ in documents)
        ids, labels, at = np.full(seq, self.pad, np.int64), np.full(seq, -100, np.int64), 0
        place = np.arange(seq)
        for tokens, learned in documents:
            end = at + len(tokens)
            ids[at:end], place[at:end] = tokens, np.arange(len(tokens))
            labels[at + 1 : end] = np.where(learned, ids[at:end], -100)[1:]
            at = end
        place[at:] = np.arange(seq - at)
        columns = {"input_ids": ids, "labels": labels} | ({"position_ids": place} if self.positions else {})
        return {name: torch.from_numpy(x) for name, x in columns.items()}

    def counted(self, counts: Counter[str]) -> str:
        """Say what was read and what was left out."""
        then = {"drop": "left out"}.get(self.long, self.long)
        aside = [f"{counts['long']:,} of more than {self.seq} tokens {then}"] * bool(counts["long"])
        aside += [f"{counts['unlearned']:,} with nothing to learn left out"] * bool(counts["unlearned"])
        read = f"{counts['read']:,} {self.kind}{'s' * (counts['read'] != 1)}"
        return f"{read} ({', '.join(aside)})" if aside else read
