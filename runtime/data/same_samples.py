"""Check that all ranks read the same dataset.

Each rank makes the dataset separately, and shardc's loader only reads this rank's part of it. So a dataset that is
already a rank's share, such as `Subset(data, range(rank, len(data), world))` of a script for DDP, is cut twice: the
ranks report the right number of samples, but most are never read, and no visible number is wrong.
Lengths do not show it, samples do: all ranks read the first, the middle and the last, and compare their hashes.

Random values in a sample (crops, masked words) are no difference, since `random`, numpy and torch are seeded for each
sample (shardc.runtime.data.worker). A dataset with a separate generator returns other values in each read, on one rank
as well: such samples prove nothing, and are not compared.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shardc.runtime.data.inputs import leaves, name_of
from shardc.runtime.data.loader import Loader
from shardc.runtime.data.worker import Reader, Rest, Stream, started
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import DisagreementError, Fact, fingerprint, hashed

FIX = (
    "return the whole Dataset on every rank, the same one: shardc reads each rank's part of it. (A Subset by the rank's"
    " number, as in scripts for DDP, loses samples, and so does split_dataset_by_node of `datasets`; random numbers"
    " that make a dataset need the same seed on all ranks)"
)

DRAWN = (
    "the stream begins with other samples each time that it is read. If its order is random, ranks read other"
    " orders, and samples are lost: draw it from a seed that is the same on all ranks"
)
#: Samples at the beginning of a stream that are compared.
BEGIN = 16


def check(mesh: Any, loader: Loader) -> None:
    """Raise ShardcError, on all ranks, if samples differ between them: of a stream, the first BEGIN. Collective.

    Loaders agree in everything else. A checkpoint has the hash of a stream's: a resumed run reads the same order.
    """
    size = loader.order.size
    if mesh.layout.world == 1 and size is not None:
        return
    indices = sorted({0, size // 2, size - 1}) if size is not None else []
    first = _digests(loader, indices)
    which = f"samples {', '.join(map(str, indices))}" if indices else f"first {BEGIN} samples"
    fault = f"the content of the dataset (its {which})"
    try:
        agreement.check(mesh, [Fact(fault, hashed(first), where=loader.where, fix=FIX)], "reading samples")
    except DisagreementError:
        changes = None in first or _digests(loader, indices) != first
        if not agreement.failures(mesh, "other values each time" if changes else None)[0]:
            raise
        if size is None:
            mesh.note(f"{loader.where}: {DRAWN}")
    else:
        loader.begins(hashed(first) if size is None and None not in first else None)


def is_same_data(one: Loader, other: Loader) -> bool:
    """Return whether two loaders read datasets of the same length and first, middle and last sample."""
    size = one.order.size
    if size is None or size != other.order.size:
        return False
    indices = sorted({0, size // 2, size - 1})
    first = _digests(one, indices)
    return None not in first and first == _digests(other, indices)


def _digests(loader: Loader, indices: list[int]) -> list[int | None]:
    """Return a hash of each sample; [None] if one of them cannot be read.

    A worker process reads them if workers read the others: the dataset may open files at its first sample, and files of
    this process would not work in a worker.
    """
    options: dict[str, Any] = {"persistent_workers": False, "pin_memory": False, "generator": torch.Generator()}
    options |= {"num_workers": min(1, loader.options["num_workers"]), "collate_fn": _same}
    reading, seed = {**loader.options, **options}, loader.order.seed
    if loader.order.size is None:
        stream = Stream(loader.dataset, _digests_of, seed, BEGIN, range(BEGIN), rest=True)
        reader: DataLoader[Any] = DataLoader(stream, batch_size=None, **reading)
    else:
        keys = [[(0, i) for i in indices]]
        reader = DataLoader(Reader(loader.dataset, _digests_of, seed), batch_sampler=keys, **reading)
    try:
        read: Any = next(started(reader), None)
    except Exception:  # raised, with the sample's name, when the sample is read for training
        read = None
    read = read.batch if isinstance(read, Rest) else read
    return read if isinstance(read, list) else [None]


def _digests_of(samples: list[Any]) -> list[int | None]:
    return [*map(digest, samples)]


def _same(value: Any) -> Any:
    return value


def digest(sample: Any) -> int:
    """Hash a nested sample: tensors, arrays, numbers and texts by value, else by type; the order of keys is ignored."""
    return hashed(sorted(((name_of(path), _value(leaf)) for path, leaf in leaves(sample)), key=itemgetter(0)))


def _value(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return fingerprint([leaf]) if leaf.layout is torch.strided and not leaf.is_nested else str(leaf.layout)
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
        return leaf
    if hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
        if array.dtype != object:
            return str(array.dtype), array.shape, array.tobytes()
    return type(leaf).__name__
