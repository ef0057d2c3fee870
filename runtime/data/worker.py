"""Read and collate this rank's samples of a global batch in a DataLoader's workers.

Random numbers of a dataset or a collate function (crops, masked words) are independent of the mesh: `random`, numpy
and torch are seeded for every sample, from the loader's seed, the epoch and the sample's index, and for every collation
from the first of its samples. So ranks that read the same samples (they differ in tp only, say) get the same numbers,
independent of other work in their processes, and so does a resumed run. The process's own random state is unchanged.
"""

from __future__ import annotations

import itertools
import pickle
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shardc.errors import ShardcError
from shardc.runtime.data.sample_errors import Failed, add_note, named
from shardc.runtime.data.sampler import Key
from shardc.runtime.data.samples import Tensors
from shardc.runtime.launch import SHORTER, short_sockets
from shardc.runtime.rng import key
from shardc.torch_private import no_worker

# Python's, numpy's and torch's random states belong to the process: ranks that are threads take turns with them.
# Workers are separate processes, and may have been forked while another thread held this lock.
_DRAWING = threading.Lock()


@contextmanager
def _draws(seed: Sequence[int] | None = None, state: _State | None = None) -> Iterator[None]:
    """Run with seeded random states, or those of `state`'s last use; restore the process's at the end."""
    with _DRAWING if get_worker_info() is None else nullcontext():
        before = _get()
        try:
            if state is not None and state.now is not None:
                _set(state.now)
            elif seed is not None:
                _seed(seed)
            yield
        finally:
            if state is not None:
                state.now = _get()
            _set(before)


class _State:
    """Random states between two uses."""

    now: tuple[Any, ...] | None = None


def _get() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


def _seed(words: Sequence[int]) -> None:
    low, high = key(*words).unsigned
    random.seed(high << 32 | low)
    np.random.seed(low)
    torch.default_generator.manual_seed(high << 32 | low)  # torch.manual_seed would seed the devices too


class Reader(Dataset[Any]):
    """A map-style dataset, read by local batches. dataset, collate: the user's. seed: of their draws."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __getitems__(self, keys: list[Key]) -> Any:
        """Return the collated samples of one local batch; in a worker, Failed if the user's code raises."""
        try:
            return self._read(keys)
        except Exception as e:
            if get_worker_info() is None:
                raise
            return Failed.of(e)

    def _read(self, keys: list[Key]) -> Any:
        with _draws():
            if getattr(self.dataset, "__getitems__", None):  # faster than reading samples one by one
                _seed((self.seed, 1, *keys[0]))
                with named(f"dataset.__getitems__([{_listed([i for _, i in keys])}])"):
                    items = self.dataset.__getitems__([i for _, i in keys])
            else:
                items = [self._one(k) for k in keys]
            _seed((self.seed, 2, *keys[0]))
            return _collated(self.collate, items, [i for _, i in keys])

    def _one(self, k: Key) -> Any:
        _seed((self.seed, 0, *k))
        with named(f"dataset[{k[1]}]"):
            return self.dataset[k[1]]


@dataclass(frozen=True)
class Rest:
    """The last, smaller batch of an epoch, whole on every rank. `engine.step` handles it."""

    batch: Any


class Stream(IterableDataset[Any]):
    """An iterable dataset as collated local batches: samples are divided by their number in the stream.

    Every rank and every worker reads all of the stream. A worker makes batches of its own global batches, in turn, and
    of them only the samples of its rank. So order and samples do not depend on mesh and workers; a dataset that
    divides itself over workers, as `datasets` does, is read as without any. batch: samples in a global batch;
    mine: their places that this rank reads; rest: it also reads samples that fill no batch. epoch, consumed: where to
    begin.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        seed: int,
        batch: int,
        mine: Sequence[int],
        *,
        rest: bool = False,
    ) -> None:
        self.dataset, self.collate, self.seed, self.rest = dataset, collate, seed, rest
        self.batch, self.mine = batch, list(mine)
        self.epoch = self.consumed = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; in a worker, a Failed if the user's code raises, and nothing after it."""
        try:
            yield from self._parts()
        except Exception as e:
            if get_worker_info() is None:
                raise
            yield Failed.of(e)

    def _parts(self) -> Iterator[Any]:
        state, worker = _State(), get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        with _draws((self.seed, 3, self.epoch), state), no_worker():
            if hasattr(self.dataset, "set_epoch"):  # as torch's distributed samplers and Hugging Face's datasets do
                self.dataset.set_epoch(self.epoch)
            stream = iter(self.dataset)
            next(itertools.islice(stream, self.consumed, self.consumed), None)  # skip
        position = self.consumed
        for number in itertools.count():
            items: list[Any] = []
            with _draws(state=state), no_worker():
                try:
                    items.extend(itertools.islice(stream, self.batch))
                except Exception as e:
                    add_note(e, f"in the iterable dataset's sample {position + len(items)}")
                    raise
            last = len(items) < self.batch
            if not items or (last and not self.rest):
                return
            if number % turns == turn:
                mine = range(len(items)) if last else self.mine
                with _draws((self.seed, 2, self.epoch, position)):
                    part = _collated(self.collate, [items[i] for i in mine], [position + i for i in mine])
                yield Rest(part) if last else part
            position += self.batch


def started(data: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of data; a DataLoader starts its workers then. Raises ShardcError if they cannot get it."""
    workers, sharing = getattr(data, "num_workers", 0), torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if short_sockets() and workers and sharing == "file_system":
        fault = "torch's sharing strategy file_system makes sockets in this folder, whose name is too long for them"
        raise ShardcError(fault, where="TMPDIR", fix=SHORTER)
    try:
        return iter(data)
    except (AttributeError, TypeError, pickle.PicklingError) as e:
        if not workers or not re.search("pickle|local object", str(e)):
            raise
        fault = f"workers that start as new Python processes (spawn, forkserver) cannot get the data: {e}"
        fix = "define functions and classes at the top level of the file, or DataLoader(multiprocessing_context='fork')"
        raise ShardcError(fault, where="data", fix=fix) from e


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any], numbers: Sequence[int]) -> Any:
    """Collate a batch. numbers: of the samples in the dataset.

    Raises ShardcError for samples that torch's default cannot collate, and, after a custom function fails, for a None.
    """
    try:
        return collate(samples)
    except Exception as e:
        plain = collate if isinstance(collate, Tensors) else None
        none = [n for n, x in zip(numbers, samples, strict=True) if x is None]
        lacking = [(n, plain.lacking(x)) for n, x in zip(numbers, samples, strict=True)] if plain is not None else []
        if none:
            several = f" ({len(none)} of the {len(samples)} of a batch are)" if none[1:] else ""
            fault = f"sample {none[0]} is None{several}"
            fix = "return a sample for every number, leave it out of the dataset, or drop it in a collate function"
            if len(none) == len(samples) and plain is None:
                fault += ": none is left of this rank's part of the batch"
                fix = "leave it out of the dataset, or return another sample in its place"
            raise ShardcError(fault, where="engine.loader", fix=fix) from e
        for number, name in lacking:
            if name:
                fix = "give it a value in each sample, leave the sample out of the dataset, or write a collate"
                raise ShardcError(f"{name!r} of sample {number} is None", where="engine.loader", fix=fix) from e
        if plain is None:
            add_note(e, f"in the collate function, of samples {_listed(numbers)}")
            raise
        if "equal size" not in str(e):
            fault = f"torch cannot make a batch of samples {numbers[0]}, ...: {type(e).__name__}: "
            fault += f"{str(e).partition(chr(10))[0]}"
            fix = "make each sample have the same keys, with tensors, arrays or numbers as values; or pass collate_fn"
            raise ShardcError(fault, where="engine.loader", fix=f"{fix} (in a model file, collate(samples))") from e
        fault = f"the samples of a batch have several sizes, and are not padded ({e})"
        fix = "pad them: collate_fn=lambda samples: ... (in a model file, collate(samples)); batch: {lengths: [...],"
        fix += " pad: {...}} in the spec keeps the number of lengths small"
        raise ShardcError(fault, where="engine.loader", fix=fix) from e


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... ({len(numbers)} in all)"
