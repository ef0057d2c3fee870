"""Read the batches of a run: data(split) of the model file, epoch after epoch, the same on every rank.

Every rank runs the user's data(), and all ranks must draw the same random numbers there. So `random`, numpy and torch
are seeded before data() is called and before each epoch (also with the part's number if data() takes `part, parts`).
shardc's loader reads Datasets, and DataLoaders that shuffle one. It can save its position, and reads only the samples
of its rank.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from shardc.cli.model_file import seed_everything, takes_parts
from shardc.errors import ShardcError
from shardc.runtime.data import same_samples
from shardc.runtime.data.loader import Loader
from shardc.runtime.data.samples import Again, first, is_batch, is_map_style
from shardc.runtime.data.worker import started


class Batches:
    """An endless iterator over the batches of a split.

    local: each batch is this rank's part of a global batch. resumes: a checkpoint stores the position; otherwise a
    resumed run reads again up to it. part: the number of this rank's part if data() takes it; parts draw different
    random numbers. epoch: number of completed epochs. description: for the header of a run. endless: there are no
    epochs: one batch is repeated.
    """

    def __init__(
        self,
        source: Any,
        make: Callable[[], Any],
        seed: int,
        *,
        local: bool,
        description: str,
        resumes: bool = False,
        part: int | None = None,
        endless: bool = False,
    ) -> None:
        self._count, self._endless = 0, endless  # batches of this epoch
        self.local, self.resumes, self.description, self.epoch = local, resumes, description, 0
        self._source, self._make, self._seed, self._read = source, make, seed, False
        self._part = () if part is None else (part,)
        self._place = 0, 0  # epoch and position of the last batch, of a dataset

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._count = 0
            batches = self.one_epoch()
            self._note_place()
            for batch in batches:
                self._count += 1
                yield batch
                self._note_place()
            if not self._count:
                none = "data() returns no batch" if not self.epoch else f"epoch {self.epoch + 1} of data() has no batch"
                fix = "return a torch Dataset, or an iterable that can be read again"
                raise ShardcError(none, where="data", fix=fix)
            self.epoch += 1

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers that the data were made with, if they have it; it is saved with the weights."""
        made_with = getattr(getattr(self._source, "dataset", None), "tokenizer", None)
        return made_with if hasattr(made_with, "save_pretrained") else None

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if the data does not say."""
        try:
            return None if self._endless else len(self._source) or None
        except TypeError:
            return None

    @property
    def position(self) -> float | None:
        """How many epochs were read, to the batch if their length is known; None if there are no epochs."""
        if self._endless:
            return None
        done, count = self.epoch, float(self._count)
        if isinstance(self._source, Loader):
            done, count = self._source.epoch, self._source.consumed / self._source.batch_size
        return done + count / self.length if self.length else float(done)

    def samples(self, rows: int) -> Tensor:
        """Return the numbers of the samples in the last global batch, which has so many rows: i64[rows].

        In the dataset; of streams and of global batches, in the order of the epoch.
        """
        order = self._source.order if isinstance(self._source, Loader) else None
        if order is not None and order.size is not None:
            order = copy.copy(order)
            order.epoch, consumed = self._place
            return order.arrange(order.whole()[consumed : consumed + rows])
        end = order.consumed if order is not None else rows if self._endless else self._count * rows
        return torch.arange(end - rows, end)

    def _note_place(self) -> None:
        if isinstance(self._source, Loader):
            self._place = self._source.epoch, self._source.consumed

    def steps(self, epochs: float, done: int) -> int:
        """Return the last step of a run of so many epochs, of which `done` steps are done. Raises ShardcError."""
        if (length := self.length) is None:
            fault = "the data does not say how many batches an epoch has"
            fix = "write --steps N; or return a Dataset, a DataLoader or a list, which has a length"
            raise ShardcError(fault, where="--epochs", fix=fix)
        read = (self.position or 0.0) * length if self.resumes else done
        return max(0, done + math.ceil(epochs * length - read - 1e-6))

    def one_epoch(self) -> Iterator[Any]:
        """Return the batches of one epoch. data() is called again if its iterator is exhausted."""
        if not self.resumes:
            seed_everything(self._seed, self.epoch, *self._part)
        if self._read and isinstance(self._source, Iterator):
            self._source = self._make()
        elif isinstance(self._source, Loader) and self._source.name is None:  # held-out data: the same each time
            self._source.restart()
        self._read = True
        return started(self._source)


#: Held-out data of a run: one set, several by their names, or none.
HeldOut = Batches | dict[str, Batches] | None


def batches(engine: Any, file: Any, split: str, seed: int, *, whole: bool = False) -> Batches | None:
    """Return the batches of data(split) of a model file, or None if there is no data() or it returns None.

    engine.loader reads a dataset or a stream of samples, and the dataset of a DataLoader that is in order or shuffled
    (its sampler is replaced by one that is the same on every mesh). Anything else must yield global batches
    (shardc.runtime.data.samples has the rule); with data(split, part, parts), this rank's part of each. whole: read
    every sample once, in order, also in a smaller last batch.
    """
    source, make, seeds = _called(engine, file, split, seed)
    if isinstance(source, Mapping) and not any(isinstance(x, Tensor) for x in source.values()):
        fault = f"data({split!r}) returns several datasets ({', '.join(map(str, source))})"
        fix = "return one of them, or a mixture: shardc.text.mix(datasets). data('valid') of a run may return several"
        raise ShardcError(fault, where="data", fix=fix)
    return None if source is None else _batches(engine, file, split, seed, source, make, seeds, whole=whole)


def held_out(engine: Any, file: Any, seed: int) -> HeldOut:
    """Return the held-out data of a run, by their names if data('valid') returns a dict of datasets."""
    source, make, seeds = _called(engine, file, "valid", seed)
    if not isinstance(source, Mapping) or any(isinstance(x, Tensor) for x in source.values()):
        return None if source is None else _batches(engine, file, "valid", seed, source, make, seeds)
    sets = {str(name): x for name, x in source.items() if x is not None}
    again = {name: functools.partial(lambda of: make()[of], name) for name in sets}
    return {n: _batches(engine, file, "valid", seed, x, again[n], seeds) for n, x in sets.items()} or None


def described(valid: HeldOut) -> str:
    """Describe held-out data for the header of a run; "" if there are none."""
    if isinstance(valid, dict):
        return "; ".join(f"{name}: {x.description}" for name, x in valid.items())
    return valid.description if valid is not None else ""


def _called(engine: Any, file: Any, split: str, seed: int) -> tuple[Any, Callable[[], Any], list[int]]:
    """Return what data(split) returns, a function that calls it again, and the seeds that it has set."""
    if file.data is None:
        return None, lambda: None, []
    by_parts = takes_parts(file.data)
    part, parts = engine.part if by_parts else (0, 1)

    def make() -> Any:  # also for a later epoch, with that epoch's seed
        return file.data(split, part=part, parts=parts) if by_parts else file.data(split)

    # each part has another seed; the epoch is in the middle, since SeedSequence ignores a 0 at the end
    seed_everything(seed, 0, *((part,) if by_parts else ()))
    our_seed = torch.initial_seed()
    try:
        source = make()
    except KeyError as e:
        if split == "valid" and e.args == (split,):
            fault, fix = "data('valid') raises KeyError: 'valid'", "return None for 'valid' if nothing is held out"
            raise ShardcError(fault, where="data", fix=fix) from e
        raise
    return source, make, [torch.initial_seed()] if torch.initial_seed() != our_seed else []


def _batches(
    engine: Any,
    file: Any,
    split: str,
    seed: int,
    source: Any,
    make: Callable[[], Any],
    seeds: list[int],
    *,
    whole: bool = False,
) -> Batches:
    """Return the batches of what data() returned. make: calls it again; seeds: that it has set."""
    by_parts, train = takes_parts(file.data), split == "train" and not whole
    _check_kind(source, by_parts)
    kind, options = type(source).__name__, None if by_parts else _taken_over(source)
    samples = options is None and not by_parts and _gives_samples(engine, file, source)
    if samples and isinstance(source, Iterator):
        source = Again(make)
    stream = not is_map_style(source)
    if samples:
        # held-out data includes a smaller last batch, if the program can be compiled for it
        dropped = train or (not whole and engine.program.resize is None)
        options = {"shuffle": train and not stream, "collate_fn": file.collate, "drop_last": dropped}
    if options is None:
        if isinstance(source, Iterator) and not by_parts:  # its first element was read
            seed_everything(seed, 0)
            source = make()
        part, parts = engine.part if by_parts else (0, 1)
        description = f"part {part} of {parts} of each global batch, of a {kind}"
        if not by_parts:
            description = f"global batches of a {kind}"
        result = Batches(source, make, seed, local=by_parts, description=description, part=part if by_parts else None)
        draws = not isinstance(source, (list, tuple))
    else:
        dataset, how = source, ""
        if isinstance(source, DataLoader):
            options |= {"shuffle": False, "drop_last": False} if whole else {}
            order = "" if isinstance(source.dataset, IterableDataset) else ", in order"
            dataset, how = source.dataset, f" of a DataLoader{', shuffled' if options['shuffle'] else order}"
            generator = source.generator or getattr(getattr(source.batch_sampler, "sampler", None), "generator", None)
            seeds = [*seeds, generator.initial_seed()] if generator is not None else seeds  # shardc does not use it
        loader = engine.loader(dataset, seed=seed, name=split if train else None, **options)
        result = Batches(loader, make, seed, local=True, resumes=True, description=f"{_samples(loader, dataset)}{how}")
        draws = options["shuffle"]
    if seeds and draws:
        note = f"drawn from --seed {seed}: the seed {seeds[0]} that data() sets does not reach its epochs"
        result.description += f" ({note})"
    return result


def _gives_samples(engine: Any, file: Any, source: Any) -> bool:
    """Return whether a dataset or iterable gives samples, and no global batches, by its first element."""
    if is_map_style(source) and isinstance(source, Dataset):
        return True
    if isinstance(source, (DataLoader, Tensor)):
        return False
    try:
        elements = first(source)
    except Exception:  # raised again, and reported, when the element is read for training
        return False
    return bool(elements) and not is_batch(engine.program, elements[0], file.collate is not None)


def _check_kind(source: Any, by_parts: bool) -> None:
    """Raise ShardcError for a tensor (its rows would be batches), a DistributedSampler, or a Dataset by parts."""
    if by_parts and isinstance(source, Dataset) and is_map_style(source):
        fault = f"data(split, part, parts) returns a {type(source).__name__}, but each rank reads its part anyway"
        raise ShardcError(fault, where="data", fix="write data(split), which returns all of it")
    if isinstance(source, Tensor):
        fault = f"data() returns a tensor {list(source.shape)}: each of its rows would be a whole global batch"
        fix = "return a Dataset of samples, such as torch.utils.data.TensorDataset(x, y) with collate(samples)"
        raise ShardcError(fault, where="data", fix=fix)
    if not isinstance(source, DataLoader):
        return
    samplers = (source.sampler, source.batch_sampler, getattr(source.batch_sampler, "sampler", None))
    if any(isinstance(s, DistributedSampler) for s in samplers):
        fault = "the DataLoader has a DistributedSampler, which splits samples over ranks: shardc splits global batches"
        fix = "remove sampler=, and write shuffle=True and the global batch's batch_size: each rank then reads only"
        raise ShardcError(f"{fault} too, so they would be split twice", where="data", fix=f"{fix} its own samples")


def note_same_data(train: Batches, valid: Batches | dict[str, Batches]) -> None:
    """Note in the description of held-out data if they are the training data (data() ignores its split)."""
    if isinstance(valid, dict):
        return
    loaders = train._source, valid._source
    if all(isinstance(x, Loader) for x in loaders) and same_samples.is_same_data(*loaders):
        valid.description += " (the training data: data('valid') returns the same as data('train'))"


def needed(engine: Any, file: Any, split: str, seed: int, *, whole: bool = False, where: str, fix: str) -> Batches:
    """Return `batches`, or the example batch if there is no data(). Raises ShardcError if data() returns None."""
    if file.data is None:
        return example(file, seed, "" if whole else ", repeated")
    if (result := batches(engine, file, split, seed, whole=whole)) is None:
        raise ShardcError(f"data({split!r}) returns None", where=where, fix=fix)
    return result


def example(file: Any, seed: int, often: str = ", repeated") -> Batches:
    """Return the example batch, repeated, for a model file without data(). often: for the description."""
    once = [file.batch]
    description = f"the one example batch of batch(){often} (the model file has no data())"
    if file.ref.startswith("hf:"):
        description = f"one batch of random ids{often} (--data chats.jsonl or FILE.py trains on others)"
    return Batches(once, lambda: once, seed, local=False, description=description, endless=True)


def _samples(loader: Loader, dataset: Any) -> str:
    """Describe the number of samples, and how many of them an epoch omits because they fill no batch.

    A dataset may say more of itself, in its attribute `summary`.
    """
    if loader.order.size is None:
        kind = "generator" if isinstance(dataset, Again) else type(dataset).__name__
        rest = "" if loader.order.rest else f", whose rest of less than {loader.batch_size} an epoch leaves out"
        return str(getattr(dataset, "summary", f"a stream of samples, of a {kind}")) + rest
    size = loader.order.size
    left = 0 if loader.order.rest else size % loader.batch_size
    left_out = f", {left} of which an epoch leaves out (batches of {loader.batch_size})" if left else ""
    return f"{getattr(dataset, 'summary', f'{size} samples')}{left_out}"


def _taken_over(loader: Any) -> dict[str, Any] | None:
    """Return options of engine.loader that read a DataLoader's samples; None for others, or if it cannot know them.

    That is the case for a custom `__iter__`, for samplers other than torch's plain ones (a subclass may draw anything),
    and for samplers of a part of the dataset.
    """
    if not isinstance(loader, DataLoader):
        return None
    batches, dataset = loader.batch_sampler, loader.dataset
    if type(loader).__iter__ is not DataLoader.__iter__ or type(batches) is not BatchSampler:
        return None
    sampler = batches.sampler  # with `batch_sampler=` the DataLoader's `sampler` is unused
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    stream = isinstance(dataset, IterableDataset)
    if not stream and (not plain or len(sampler) != len(dataset)):  # type: ignore[arg-type]
        return None
    return {
        "batch_size": batches.batch_size,
        "shuffle": type(sampler) is RandomSampler,
        "drop_last": batches.drop_last,
        **{name: getattr(loader, name) for name in _READING},
    }


#: Options of a DataLoader that say how samples are read, not which.
_READING = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)
