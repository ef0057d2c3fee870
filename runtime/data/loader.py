"""Load batches for an engine: every rank reads its part, in a resumable order, the same on any mesh.

    for part in engine.loader(dataset):       # one epoch, or the rest of it
        engine.step(part, local=True)

The layouts of the program's inputs decide which samples of a global batch a rank reads. So ranks with the same part of
the batch (they differ in tp, say) read the same samples. torch.utils.data.DataLoader does the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from shardc.errors import Errors, ShardcError
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.optional import needed
from shardc.runtime.data.inputs import batch_dims, mapped, name_of
from shardc.runtime.data.inputs import rows as rows_of
from shardc.runtime.data.ragged import Ragged, by_microbatch
from shardc.runtime.data.sample_errors import Failed
from shardc.runtime.data.sampler import Order
from shardc.runtime.data.samples import Tensors, check_again, is_map_style
from shardc.runtime.data.worker import Reader, Rest, Stream, started

#: More samples than any dataset has: Grain's repeat() says so of data without end.
ENDLESS = 1 << 48


class Loader:
    """One epoch at a time of local parts of global batches, for `engine.step(part, local=True)`.

    Made by `engine.loader`; see there. Its position moves when a part is returned, however far workers have read ahead;
    the last part of an epoch moves it to the next epoch. A new iteration continues one that was interrupted.
    """

    _begin: tuple[int | None, int | None] = None, None  # hashes of a stream's first samples: saved, and now

    def __init__(
        self,
        program: Program,
        mesh: Any,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str | None = "train",
        **options: Any,
    ) -> None:
        self.program, self.mesh, self.name, self.dataset = program, mesh, name, dataset
        self.where = f"loader {name!r}" if name is not None else "loader"
        self._dims = batch_dims(program)
        self.batch_size = self._batch_size(batch_size)
        size = None if self._is_stream() else len(dataset)
        # a separate object, not this one: DataLoader holds its sampler, and workers only end at once if there is no
        # reference cycle
        shuffle = size is not None if shuffle is None else shuffle
        self.order = Order(size, self.batch_size, samples_of(program, mesh.rank), shuffle, seed, rest=not drop_last)
        self._check(drop_last, options)
        self._collate = Tensors(program) if collate_fn in (None, default_collate) else collate_fn
        #: Decides which rank reads which sample of a batch (shardc.features.rows); None: by their order. Held-out data
        #: have no name, and are read in order.
        self.balance: Any = None
        if name is not None and getattr(program.spec.batch, "balance", False):
            self.balance = needed("rows", "runtime", "Balance")(self, self._collate, drop_last=drop_last)
            if self.balance.ragged:
                self.order.take = self.balance.mine
                self._collate = partial(by_microbatch, self._collate, self.balance.rank_rows)
            else:
                self.order.arrange = self.balance.arranged
        # the workers' seeds come from a separate generator: the process's is unchanged
        self.options = {"generator": torch.Generator().manual_seed(seed), "num_workers": num_workers, **options}
        self._reading: DataLoader[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next part."""
        return self.order.epoch

    @property
    def consumed(self) -> int:
        """How many samples of that epoch all ranks together have received."""
        return self.order.consumed

    def __len__(self) -> int:
        """Return the number of global batches in an epoch. TypeError for an iterable dataset."""
        return len(self.order)

    def __repr__(self) -> str:
        data = "a stream" if self.order.size is None else f"{self.order.size} samples"
        return f"<Loader of {data} in global batches of {self.batch_size}: epoch {self.epoch}, {self.consumed} read>"

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's parts of the rest of the epoch.

        Errors of dataset or collate_fn come unchanged, with a note on the sample, also from a worker (see
        sample_errors).
        """
        stream, nonempty = self.order.size is None, self.consumed > 0
        for part in started(self._reader()):
            if isinstance(part, Failed):
                raise part.again()
            nonempty, rest = True, self.order.at_rest
            sizes = self.balance.sizes_of_next() if self.balance is not None else None
            self.order.advance()
            if sizes is not None:
                yield Ragged(tuple(part), *sizes)
            else:
                yield part if isinstance(part, Rest) else Rest(part) if rest else self._cut(part)
        if stream:
            if not nonempty:
                fault = f"the dataset ends before one global batch of {self.batch_size} samples"
                raise ShardcError(fault, where=self.where, fix="use more samples, or compile for a smaller batch")
            self.order.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return its position and what fixes the order, JSON-able; the dataset's `digest`; how a stream begins."""
        digest, begin = getattr(self.dataset, "digest", None), self._begin[1]
        more = {"digest": None if digest is None else str(digest), "begin": begin}
        return self.order.state_dict() | {name: x for name, x in more.items() if x is not None}

    def begins(self, now: int | None, saved: int | None = None) -> None:
        """Take the hash of a stream's first samples, now or in a checkpoint; note if it begins with others now."""
        then, now = self._begin = saved or self._begin[0], now or self._begin[1]
        if None not in (then, now) and then != now and self.consumed:
            fault = f"{self.where}: the stream begins with other samples than in the run of the checkpoint, so"
            fix = "shuffle with a fixed seed, or begin with --new-data"
            self.mesh.note(f"{fault} after {self.consumed} of them some come twice, and others never: {fix}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the first sample that the saved loader had not returned; any mesh and batch size.

        The saved seed and order replace the present ones. Raises ShardcError for a dataset of another size.
        """
        self.check(state)
        self.order.load_state_dict(state)
        self._reading = None  # its reader has the seed
        self.begins(None, state.get("begin"))

    def restart(self) -> None:
        """Begin with the first epoch."""
        self.order.restart()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ShardcError if the saved loader read a dataset of another size or digest."""
        fix = "continue with the same dataset, or begin with this one: load(folder, new_data=True), run: --new-data"
        then, now = state.get("digest"), self.state_dict().get("digest")
        if then and now and then != now:
            fault = f"the checkpoint is in the middle of other data: their digest was {then}, and now it is {now}"
            raise ShardcError(f"{fault} (other texts, tokenizer or settings)", where=self.where, fix=fix)
        if state["size"] != self.order.size:
            sizes = (state["size"], self.order.size)
            then, now = (f"{n} samples" if n is not None else "an iterable dataset" for n in sizes)
            fault = f"the checkpoint is in the middle of {then}, but this one is {now}"
            raise ShardcError(fault, where=self.where, fix=fix)

    # --- reading

    def _reader(self) -> DataLoader[Any]:
        order = self.order
        if order.size is None:  # a new one for each epoch: its workers' copies know where to begin
            mine = order.mine.tolist()
            stream = Stream(self.dataset, self._collate, order.seed, order.batch, mine, rest=order.rest)
            stream.epoch, stream.consumed = order.epoch, order.consumed
            return DataLoader(stream, batch_size=None, collate_fn=_same, **self.options)
        if self._reading is None:  # kept, for persistent_workers
            reader = Reader(self.dataset, self._collate, order.seed)
            self._reading = DataLoader(reader, batch_sampler=order, collate_fn=_same, **self.options)
        return self._reading

    def _cut(self, part: Any) -> Any:
        """Cut dims that are split but not the batch's, such as a sequence, which were read whole."""
        cuts = {}
        for x in self.program.inputs:
            layout = Layout(tuple((a, s) for a, s in x.layout.shards() if s.dim != self._dims[x.name]))
            if layout.items:
                cuts[x.path] = layout
        if not cuts:
            return part
        return mapped(part, (), lambda path, leaf: self._local(cuts[path], leaf) if path in cuts else leaf)

    def _local(self, layout: Layout, leaf: Any) -> Any:
        fits = isinstance(leaf, Tensor) and not layout.problem(leaf.shape, self.program.mesh)
        # the engine's step reports what does not fit
        return layout.local(leaf, self.program.mesh, self._coords) if fits else leaf

    # --- options, and whether they go together

    @property
    def _coords(self) -> dict[str, int]:
        return self.program.mesh.coords(self.mesh.rank)

    def _batch_size(self, requested: int | None) -> int:
        """Return the samples in a global batch: the smallest batch dim of the inputs, which divides all."""
        errors = Errors()
        for x in self.program.inputs:
            if x.layout.paddings():
                fault = f"its size {list(x.shape)} does not divide over the ranks: the last parts would be padded"
                fix = "compile for a batch that divides, or pass engine.step whole batches from your own DataLoader"
                errors.add(fault, where=name_of(x.path), fix=fix)
        errors.raise_any()
        sizes = {name_of(x.path): x.shape[d] for x in self.program.inputs if (d := self._dims[x.name]) is not None}
        if not sizes:
            fault, fix = "none of the program's inputs has a batch dim", "set one in the spec's batch: {dims: ...}"
            raise ShardcError(fault, where=self.where, fix=fix)
        batch = min(sizes.values())
        for name, size in sizes.items():
            if size % batch:
                fix = f"set the batch dim of {name!r} in the spec's batch: {{dims: ...}}, or null if it has none"
                fault = f"its batch dim is {size} long, which is not a multiple of the other inputs' {batch}"
                errors.add(fault, where=name, fix=fix)
        errors.raise_any()
        if requested is not None and requested != batch:
            fault = f"batch_size is {requested}, but the program was compiled for global batches of {batch} samples"
            raise ShardcError(fault, where=self.where, fix=f"leave it out, or compile with a batch of {requested}")
        return batch

    def _is_stream(self) -> bool:
        """Return whether samples come in the dataset's own order. Raises ShardcError if it is no dataset."""
        data = self.dataset
        if isinstance(data, DataLoader):
            fix = "pass its dataset, and its collate_fn and num_workers"
            raise ShardcError("a DataLoader is not a dataset", where=self.where, fix=fix)
        if isinstance(data, Mapping):
            datasets = [name for name, x in data.items() if not isinstance(x, Tensor)]
            one = f"one of its entries, such as {datasets[0]!r}" if datasets else "a dataset of single samples"
            raise ShardcError(f"a {type(data).__name__} is not a dataset", where=self.where, fix=f"pass {one}")
        if is_map_style(data):
            if len(data) >= ENDLESS:
                fix = "leave out its repeat(): the loader begins the next epoch itself"
                raise ShardcError(f"a {type(data).__name__} that never ends has no epochs", where=self.where, fix=fix)
            return False
        if not hasattr(data, "__iter__"):
            fault = f"a {type(data).__name__} is not a dataset: it has neither __getitem__ and __len__, nor __iter__"
            raise ShardcError(fault, where=self.where, fix="pass a torch.utils.data.Dataset or IterableDataset")
        check_again(data, self.where)
        return True

    def _check(self, drop_last: bool, options: Mapping[str, Any]) -> None:
        errors, size = Errors(), self.order.size
        for name in {"sampler", "batch_sampler"} & options.keys():
            fix = "leave it out; for your own order, wrap the dataset and pass shuffle=False"
            errors.add(f"{name} is set by the loader, which decides what each rank reads", where=self.where, fix=fix)
        if size is None and self.order.shuffle:
            fix = "leave shuffle out, and shuffle in the dataset"
            errors.add("an iterable dataset has its own order", where=self.where, fix=fix)
        needs = self.batch_size if drop_last or self.program.resize is None else 1
        if size is not None and size < needs:
            read = f" (it has read {x})" if (x := getattr(self.dataset, "summary", "")) else ""
            fault = f"the dataset has {size} samples{read}, fewer than one global batch of {self.batch_size}"
            errors.add(fault, where=self.where, fix="use more samples, or compile for a smaller batch")
        elif not drop_last and self.program.resize is None and (size is None or size % self.batch_size):
            rest = f"{size % self.batch_size} samples" if size is not None else "the rest of the samples"
            fault = f"the last batch of an epoch would be {rest}, not {self.batch_size} as compiled"
            errors.add(fault, where=self.where, fix="leave drop_last out: each epoch's order drops other samples")
        errors.raise_any()


def samples_of(program: Program, rank: int) -> Tensor:
    """Return the places in a global batch that a rank reads, by the layouts: i64[local batch]."""
    dims, coords, batch = batch_dims(program), program.mesh.coords(rank), rows_of(program)
    indices: Tensor | None = None
    for x in program.inputs:
        d = dims[x.name]
        if d is None:
            continue
        rows = x.shape[d] // batch  # of one sample
        layout = Layout(tuple((a, replace(s, dim=0)) for a, s in x.layout.shards(d)))
        places = layout.local(torch.arange(x.shape[d]) // rows, program.mesh, coords)
        samples = places[::rows]
        if not torch.equal(places, samples.repeat_interleave(rows)) or (
            indices is not None and not torch.equal(indices, samples)
        ):
            fault = "its batch dim is not split into the same whole samples on the same ranks as the other inputs"
            fix = "split the batch of all inputs alike, or pass engine.step whole batches of your own DataLoader"
            raise ShardcError(fault, where=name_of(x.path), fix=fix)
        indices = samples
    assert indices is not None
    return indices


class Loaders(dict[str, Loader]):
    """An engine's loaders by name, and saved states of those that are not made yet.

    A checkpoint has their positions after the last step. A batch that was returned for a step that did not finish,
    because it failed or the run stopped, is the next one of the resumed run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, Any] = {}
        self._stepped: dict[str, Any] = {}

    def add(self, loader: Loader) -> Loader:
        """Keep a loader in checkpoints under its name, unless that is None."""
        if loader.name is None:
            return loader
        if loader.name in self:
            fix = "use that one for every epoch, or give this one its own name; name=None is not kept in checkpoints"
            raise ShardcError(f"the engine already has a loader named {loader.name!r}", where="engine.loader", fix=fix)
        if loader.name in self._waiting:
            loader.load_state_dict(self._waiting[loader.name])
        self[loader.name] = loader
        self._stepped[loader.name] = loader.state_dict()
        return loader

    def note_step(self) -> None:
        """Record that all batches returned so far were trained on."""
        self._stepped = {name: loader.state_dict() for name, loader in self.items()}

    def state_dict(self) -> dict[str, Any]:
        return self._waiting | self._stepped

    def check(self, states: Mapping[str, Any]) -> None:
        """Raise ShardcError if a loader cannot continue from its state."""
        for name in self.keys() & states.keys():
            self[name].check(states[name])

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the states of loaders; those of loaders that are not made yet wait for them."""
        self._waiting = dict(states)
        for name in self.keys() & states.keys():
            self[name].load_state_dict(states[name])
        self.note_step()

    def restart(self) -> None:
        """Begin with the first epoch, and forget saved states."""
        self._waiting = {}
        for loader in self.values():
            loader.restart()
        self.note_step()


def _same(part: Any) -> Any:
    return part
