"""The batches of a run: what the model file's data(split) returns, epoch after epoch, the same on every rank.

Every rank runs the user's data() by itself, so whatever is drawn there from `random`, numpy or torch has to be drawn
alike: all three are seeded before data() is called and before each epoch (with the part's number as well, where
data(split, part, parts) gives parts). Datasets, and DataLoaders that shuffle one,
are read by shardc's own loader, which knows where it stands and reads only the samples of its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Batches:
    """An endless iterator over the batches of a split. local: each is this rank's part of a global batch. resumes: a
    checkpoint says where it stands; what does not is read again up to there.

    part: the number of that part, where data() reads it by itself: it draws other numbers than those of other parts.
    epoch: how many have begun before this one. description: for the header of a run.
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
    ) -> None:
        self.local, self.resumes, self.description, self.epoch = local, resumes, description, 0
        self._source, self._make, self._seed, self._read = source, make, seed, False
        self._part = () if part is None else (part,)

    def __iter__(self) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self.one_epoch():
                count += 1
                yield batch
            if not count:
                raise ShardcError(
                    "data() returns no batch" if self.epoch == 0 else f"epoch {self.epoch + 1} of data() has no batch",
                    where="data",
                    fix="return a torch Dataset, or an iterable that can be read again",
                )
            self.epoch += 1

    def one_epoch(self) -> Iterator[Any]:
        """The batches of one epoch. An iterator that is used up is made again by data()."""
        if not self.resumes:
            seed_everything(self._seed, self.epoch, *self._part)
        if self._read and isinstance(self._source, Iterator):
            self._source = self._make()
        self._read = True
        return iter(self._source)


def batches(engine: Any, file: Any, split: str, seed: int, *, whole: bool = False) -> Batches | None:
    """What data(split) of a model file returns, as batches; None where that is None, or where there is no data().
    whole: every sample of a Dataset once, in its order, in a smaller last batch too.

    A map-style Dataset is read by engine.loader; so is the dataset of a DataLoader that reads it in order or shuffled
    (its sampler is replaced by one that is the same on every mesh). Anything else has to yield global batches; or, of
    data(split, part, parts), this rank's part of each.
    """
    if file.data is None:
        return None
    by_parts = takes_parts(file.data)

    part, parts = engine.part if by_parts else (0, 1)

    def make() -> Any:  # of a later epoch, with that epoch's seed
        return file.data(split, part=part, parts=parts) if by_parts else file.data(split)

    # ranks of other parts draw other rows; the epoch stands between, since a 0 at the end seeds as nothing does
    seed_everything(seed, 0, *((part,) if by_parts else ()))
    our_seed = torch.initial_seed()
    try:
        source, train = make(), split == "train" and not whole
    except KeyError as e:
        if split == "valid" and e.args == (split,):
            fault, fix = "data('valid') raises KeyError: 'valid'", "return None for 'valid' where nothing is held out"
            raise ShardcError(fault, where="data", fix=fix) from e
        raise
    if source is None:
        return None
    result = _batches(source, make, engine, file, "" if whole else split, seed, apart=by_parts)
    their_seed = torch.initial_seed() if torch.initial_seed() != our_seed else _of_generator(source)
    if their_seed is not None and not isinstance(source, (list, tuple)) and not _in_order(source, train=train):
        result.description += (
            f" (drawn from --seed {seed}: the seed {their_seed} that data() sets does not reach its epochs)"
        )
    return result


def _check_kind(source: Any) -> None:
    """Raises ShardcError for what data() may return and nobody means: a tensor, whose rows would be the batches, and a
    sampler that gives each rank other samples, which would be cut once more.
    """
    if isinstance(source, Tensor):
        fault = f"data() returns a tensor {list(source.shape)}: each of its rows would be a whole global batch"
        fix = "return a Dataset of samples, such as torch.utils.data.TensorDataset(x, y) with collate(samples)"
        raise ShardcError(fault, where="data", fix=fix)
    if not isinstance(source, DataLoader):
        return
    samplers = (source.sampler, source.batch_sampler, getattr(source.batch_sampler, "sampler", None))
    if any(isinstance(s, DistributedSampler) for s in samplers):
        raise ShardcError(
            "the DataLoader has a DistributedSampler, which gives each rank other samples: shardc cuts global batches"
            " itself, so they would be cut twice",
            where="data",
            fix="leave sampler= out, and write shuffle=True and the global batch's batch_size: each rank then reads its"
            " own samples alone",
        )


def tell_the_same(train: Batches, valid: Batches) -> None:
    """Say of held-out data that are the training data, as of a data(split) that does not look at its split, that they
    are: their loss would be taken for a held-out one.
    """
    loaders = train._source, valid._source
    if all(isinstance(x, Loader) for x in loaders) and same_samples.alike(*loaders):
        valid.description += " (the training data: data('valid') gives what data('train') gives)"


def _batches(
    source: Any, make: Callable[[], Any], engine: Any, file: Any, split: str, seed: int, *, apart: bool
) -> Batches:
    """split: "": every sample once, in order."""
    train, whole = split == "train", not split
    _check_kind(source)
    if apart:
        return _part_of_a_stream(source, make, engine, seed)
    name = split if train else None
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        # what is held out counts whole: a smaller last batch too, where the program can be compiled for it
        dropped = train or (not whole and engine.program.resize is None)
        loader = engine.loader(source, shuffle=train, seed=seed, collate_fn=file.collate, name=name, drop_last=dropped)
        return Batches(loader, make, seed, local=True, resumes=True, description=_samples(loader))
    if isinstance(source, DataLoader) and (options := _taken_over(source)) is not None:
        if whole:
            options |= {"shuffle": False, "drop_last": False}
        loader = engine.loader(source.dataset, seed=seed, name=name, **options)
        how = "shuffled" if options["shuffle"] else "in order"
        description = f"{_samples(loader)} of a DataLoader, {how}"
        return Batches(loader, make, seed, local=True, resumes=True, description=description)
    return Batches(source, make, seed, local=False, description=f"global batches of a {type(source).__name__}")


def _part_of_a_stream(source: Any, make: Callable[[], Any], engine: Any, seed: int) -> Batches:
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        fault = f"data(split, part, parts) returns a {type(source).__name__}, of which each rank reads its part anyway"
        raise ShardcError(fault, where="data", fix="write data(split), which returns all of it")
    part, parts = engine.part
    description = f"part {part} of {parts} of each global batch, of a {type(source).__name__}"
    return Batches(source, make, seed, local=True, description=description, part=part)


def example(file: Any, seed: int, often: str = ", again and again") -> Batches:
    """The example batch, again and again: what trains a model file that has no data(). often: for the description."""
    once = [file.batch]
    description = f"the one example batch of batch(){often} (the model file has no data())"
    if file.ref.startswith("hf:"):
        description = f"one batch of random ids{often} (a model.py with model(), batch() and data(split) has others)"
    return Batches(once, lambda: once, seed, local=False, description=description)


def _samples(loader: Loader) -> str:
    """How many there are, and how many of them an epoch leaves out, because they fill no batch."""
    size = loader.order.size or 0
    left = 0 if loader.order.rest else size % loader.batch_size
    return f"{size} samples" + (
        f", {left} of which an epoch leaves out (batches of {loader.batch_size})" if left else ""
    )


def _of_generator(source: Any) -> int | None:
    """The seed of a DataLoader's own generator, which is not taken over; None without one."""
    if not isinstance(source, DataLoader) or _taken_over(source) is None:
        return None
    sampler = getattr(source.batch_sampler, "sampler", None)
    of_sampler = source.generator or getattr(sampler, "generator", None)
    return of_sampler.initial_seed() if of_sampler is not None else None


def _in_order(source: Any, *, train: bool) -> bool:
    """Is nothing drawn when it is read?"""
    if isinstance(source, DataLoader):
        options = _taken_over(source)
        return options is not None and not options["shuffle"]
    return isinstance(source, Dataset) and not isinstance(source, IterableDataset) and not train


def _taken_over(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Options of engine.loader that read the same samples; None where nobody but the loader itself knows which: its
    own `__iter__`, samplers of other classes than torch's plain ones (a subclass may draw anything), or of a part of
    the dataset.
    """
    batches, dataset = loader.batch_sampler, loader.dataset
    if type(loader).__iter__ is not DataLoader.__iter__ or type(batches) is not BatchSampler:
        return None
    sampler = batches.sampler  # with `batch_sampler=` the loader's own one reads nothing
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if isinstance(dataset, IterableDataset) or not plain or len(sampler) != len(dataset):  # type: ignore[arg-type]
        return None
    return {
        "batch_size": batches.batch_size,
        "shuffle": type(sampler) is RandomSampler,
        "drop_last": batches.drop_last,
        **{name: getattr(loader, name) for name in _READING},
    }


#: Options of a DataLoader that say how samples are read, not which.
_READING = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
