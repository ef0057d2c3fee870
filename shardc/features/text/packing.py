"""Pack documents into rows of one length, by best fit decreasing within a window.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling". The window bounds what a stream keeps in memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from shardc.features.text.chat_masks import Tokens


def best_fit(lengths: Sequence[int], seq: int) -> list[list[int]]:
    """Return the numbers of the documents of each row: the longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free places, row), in order
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        free, row = room.pop(at) if at < len(room) else (seq, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if free > lengths[i]:
            insort(room, (free - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def packed(documents: Iterable[Tokens], seq: int, window: int) -> Iterator[list[Tokens]]:
    """Yield the documents of each row; `window` of them are packed at a time. A window of 1 packs none."""
    stream = iter(documents)
    while chunk := list(islice(stream, window)):
        for row in best_fit([len(ids) for ids, _ in chunk], seq):
            yield [chunk[i] for i in row]


def row_of(documents: Iterable[Tokens], seq: int, pad: int, *, positions: bool) -> dict[str, Tensor]:
    """Return a row: documents one after the other, and padding, which is a document of its own.

    Positions begin again with each document, by which attention keeps documents apart. The first token of a document
    is no label: what precedes it is another document. So a packed loss is that of each document alone.
    """
    ids, labels, at = np.full(seq, pad, np.int64), np.full(seq, -100, np.int64), 0
    place = np.arange(seq)
    for tokens, learned in documents:
        end = at + len(tokens)
        ids[at:end] = tokens
        labels[at:end] = np.where(learned, ids[at:end], -100)
        labels[at] = -100
        place[at:end] = np.arange(len(tokens))
        at = end
    place[at:] = np.arange(seq - at)
    columns = {"input_ids": ids, "labels": labels} | ({"position_ids": place} if positions else {})
    return {name: torch.from_numpy(x) for name, x in columns.items()}
