"""Tell samples from global batches, and make batches of samples as `datasets`, Grain and others give them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset, default_collate

from shardc.errors import ShardcError
from shardc.ir.patterns import match
from shardc.ir.program import Program
from shardc.runtime.data.inputs import Path, batch_dims, entries, leaves, mapped, name_of, type_name, with_values


def is_map_style(data: Any) -> bool:
    """Return whether elements are read by number: torch's Dataset, `datasets`', Grain's, a list, and such."""
    if isinstance(data, (Mapping, Tensor, str, DataLoader, IterableDataset)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def is_batch(program: Program, element: Any, collate: bool) -> bool:
    """Return whether what data() gives first is a global batch, and no sample.

    The rule: an element that gives inputs with as many dims as they were compiled with is a global batch; one with
    other dims, or one that only `collate` can read, is a sample. Raises ShardcError for an element with all dims but
    one row: it may be either.
    """
    dims, given = batch_dims(program), False
    for x in program.inputs:
        leaf = _at(element, x.path)
        if (d := dims[x.name]) is None or (shape := _shape(leaf)) is None:
            continue
        given = True
        if len(shape) != len(x.shape):
            return False
        if shape[d] == 1 < x.shape[d]:
            fault = f"data() gives {type_name(x.dtype, shape)}: is it a sample, or a global batch of one row?"
            fix = f"give a sample without its dim {d} of 1 (x.squeeze({d})), or begin with a batch of {x.shape[d]} rows"
            raise ShardcError(fault, where=name_of(x.path), fix=fix)
    return given or not collate


def _at(element: Any, path: Path) -> Any:
    """Return the value at a path in a nested element; None if there is none."""
    for key in path:
        element = dict(entries(element) or ()).get(key)
    return element


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor, an array, a number, or lists of numbers; None of anything else."""
    shape = getattr(_tensor(leaf), "shape", None)
    return tuple(shape) if shape is not None else None


def check_again(data: Any, where: str) -> None:
    """Raise ShardcError for a source that can be read only once: each epoch reads it, and a look at its form."""
    if isinstance(data, Iterator):
        fix = "pass an object whose __iter__ starts again, such as a torch.utils.data.IterableDataset, or a list"
        raise ShardcError(f"a {type(data).__name__} can be read only once", where=where, fix=fix)


class Again:
    """An iterable that is made anew for each reading: data() returns an iterator, which can be read once."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def first(data: Iterable[Any]) -> list[Any]:
    """Return the first element, in a list; [] if there is none."""
    if is_map_style(data):
        return [data[0]] if len(data) else []  # type: ignore[index, arg-type]
    return list(islice(data, 1))


class Tensors:
    """torch's default collate, for samples of plain Python too.

    Lists of numbers, and numbers, of an input become tensors of the dtype that it was compiled with. Columns that the
    program does not take, and of which torch makes no tensor, are left out: texts, None. A tensor that it does not take
    stays, and is an error of the step: it may be a mask that the model needs.
    """

    def __init__(self, program: Program) -> None:
        self.dtypes = {x.path: x.dtype for x in program.inputs}
        #: {path of an input that the spec's `batch: {pad}` names: the number that makes all samples as long}
        self.fills = {
            x.path: number
            for x in program.inputs
            for number in [next((n for p, n in program.spec.batch.pad.items() if match(p, name_of(x.path))), None)]
            if number is not None
        }
        self.wanted = {path[0] for path in (*self.dtypes, *dict(program.baked)) if path}

    def __call__(self, samples: list[Any]) -> Any:
        if all(isinstance(x, Mapping) for x in samples):
            others = [name for name in samples[0] if name not in self.wanted]
            left_out = {name for name in others if not _makes_tensor([x.get(name) for x in samples])}
            samples = [
                {k: _tensor(v) if k in others else v for k, v in x.items() if k not in left_out} for x in samples
            ]
        return default_collate(self._as_long([self._tensors(x, ()) for x in samples]))

    def _as_long(self, samples: list[Any]) -> list[Any]:
        """Return samples whose inputs are padded to the longest of them, by the numbers of the spec."""
        sizes = [
            {p: len(x) for p, x in leaves(one) if p in self.fills and isinstance(x, Tensor) and x.dim()}
            for one in samples
        ]
        longest = max((n for one in sizes for n in one.values()), default=0)
        if all(n == longest for one in sizes for n in one.values()):
            return samples

        def longer(path: Path, x: Any) -> Any:
            if path not in self.fills or not isinstance(x, Tensor) or not x.dim() or len(x) == longest:
                return x
            return pad(x, (*[0, 0] * (x.dim() - 1), 0, longest - len(x)), value=self.fills[path])

        return [mapped(one, (), longer) for one in samples]

    def _tensors(self, value: Any, path: Path) -> Any:
        if path in self.dtypes:
            return _tensor(value, self.dtypes[path])
        inner = entries(value)
        if inner is None or not (isinstance(value, Mapping) or any(p[: len(path)] == path for p in self.dtypes)):
            return value
        return with_values(value, [self._tensors(x, (*path, key)) for key, x in inner])

    def lacking(self, sample: Any) -> str:
        """Return the name of an input that is None in a sample; "" if there is none."""
        values = dict(sample) if isinstance(sample, Mapping) else {}
        return next((str(p[0]) for p in self.dtypes if p and values.get(p[0], "") is None), "")


def _tensor(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return numbers of Python as a tensor, of this dtype if it is of the same kind; anything else as it is."""
    if not isinstance(value, (bool, int, float, complex, list, tuple)):
        return value
    try:
        made = torch.from_numpy(np.array(value))
    except (TypeError, ValueError):  # texts, None; lists of several lengths
        return value
    return made.to(dtype) if dtype is not None and (_kind(made.dtype) == _kind(dtype) or not made.numel()) else made


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _makes_tensor(values: list[Any]) -> bool:
    """Return whether torch makes a tensor of these values of a column that the program does not take."""
    try:
        return any(isinstance(leaf, Tensor) for _, leaf in leaves(default_collate([_tensor(x) for x in values])))
    except Exception:  # any: a type that it does not know, sizes that differ
        return False
