"""Write weights for other programs: safetensors files, or a folder for transformers or peft.

    OUT/config.json, generation_config.json       of the model; tokenizer, processor, chat template: from where the
                                                  weights came
    OUT/model.safetensors                         or model-00001-of-00003.safetensors, ... and their index
    OUT/adapter_model.safetensors, adapter_config.json      of a model with peft's adapters, instead

Names and form are those of the model's own checkpoints: tensors that transformers joined when it loaded (experts, fused
projections) are separate again. Every rank knows from the headers where each number is, and writes what it holds to its
place. A conversion of a tensor needs the whole tensor, which all ranks gather, one at a time.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import operator
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.optional import registered
from shardc.runtime.mesh import agreement
from shardc.runtime.state.boxes import Numbers, Sliced, index, kept, whole
from shardc.runtime.state.init_tape import Recorder, Ref, Tape
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.parts import gathered_entry
from shardc.runtime.state.pretrained import pretrained_modules
from shardc.runtime.state.tensor_file import NAMES, bytes_of, header, open_safetensors
from shardc.runtime.state.weight_files import weight_files
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Url
from shardc.torch_private import pytree

#: Bytes of an exported file of weights at most, by default.
MAX_FILE_BYTES = 5_000_000_000
#: Files of a folder that belong to a model and not to its weights: an export copies them.
CARRIED = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.(model|tiktoken|jinja|py)"
    r"|(pre|video_pre)?processor_config\.json|chat_template.*|generation_config\.json"
)
WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

#: In the metadata of every file written here, which may be overwritten; files of others need `overwrite`.
_MARK = {"written by": "shardc"}

#: Yields what a rank holds of a tensor: (offset, shape, values) of boxes.
Held = Callable[[str], Iterable[tuple[Numbers, Numbers, Tensor]]]


@dataclass(frozen=True)
class Output:
    """A tensor of a file, and its tape ref.

    of: names of the tensors that it is computed from; itself: it is one of them, unchanged.
    """

    name: str
    dtype: torch.dtype
    ref: Ref
    of: tuple[str, ...]
    itself: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.ref.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The files of one folder. stem: "model" or "adapter_model"; outputs: their tensors, in order.

    values: of named tensors, during a computation. metadata: in every file's header. finish: writes the other files of
    the folder. single: the only file, of any size and name.
    """

    folder: Path
    stem: str
    outputs: tuple[Output, ...]
    tape: Tape
    values: dict[str, Tensor]
    metadata: Mapping[str, str]
    finish: Callable[[], None]
    single: Path | None

    def files(self, max_bytes: int) -> dict[Path, list[Output]]:
        """Return the outputs of each file, of at most `max_bytes` or one tensor."""
        groups: list[list[Output]] = [[]]
        size = 0
        for x in self.outputs:
            if groups[-1] and size + x.nbytes > max_bytes and self.single is None:
                groups.append([])
                size = 0
            groups[-1].append(x)
            size += x.nbytes
        ends = [f"-{i + 1:05d}-of-{len(groups):05d}" for i in range(len(groups))] if groups[1:] else [""]
        finals = (self.single or self.folder / f"{self.stem}{end}.safetensors" for end in ends)
        return dict(zip(finals, groups, strict=True))


# --- from an engine ---------------------------------------------------------------------------------------------------


def export_safetensors(
    path: str | Path,
    held: RankState,
    *,
    wholes: Mapping[str, Tensor] | None = None,
    model: nn.Module | None = None,
    carried: Path | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    merge: bool = False,
) -> list[Path]:
    """Write the model's weights for other programs. Returns the folders. Collective.

    All ranks write, and see one file system. path: a `.safetensors` file, or a folder: then `model.safetensors`, or
    numbered files of at most `max_file_bytes` with an index. wholes: the local parts of parameters, where `held` has
    flat shards (ZeRO). model: of transformers or peft, on the meta device: its config and adapters are
    written too, and names are as in its own checkpoints. carried: the source folder of the weights, whose tokenizer is
    copied. dtype: of floating-point tensors; None: unchanged. A tied tensor is stored once, under the model's first
    name for it; the other names are in the file's metadata, as `safetensors.torch.load_model` expects. overwrite: also
    replace weights that shardc did not write. merge: the whole model, with the spec's adapters added to their weights;
    else, with such adapters, only these, as peft has them. Raises ShardcError, on all ranks.
    """
    path, program, mesh = disk_calls.expanded(path), held.program, held.mesh
    if isinstance(path, Url):
        fix = "export to a folder of this machine, or save a checkpoint there: engine.save"
        raise ShardcError("weights are not exported to a store", where=str(path), fix=fix)
    stored: list[Param | Buffer] = [*program.params, *(b for b in kept(program) if b.persistent)]
    tensors = {n: (x, shape) for x in stored for n, shape in x.shapes.items() if x.members or n == x.fqn}
    ties = {alias: x.fqn for x in stored for alias in x.aliases}
    shapes = {n: (shape, x.dtype) for n, (x, shape) in tensors.items()}
    layouts = plan(path, shapes, ties, model, carried, dtype, program, merge=merge)
    targets = [x.single or x.folder for x in layouts]
    asked = targets if mesh.rank == 0 and not overwrite else []
    foreign = next((file for x in asked if (file := foreign_weights(x)) is not None), None)
    _, words = agreement.failures(mesh, None if foreign is None else str(foreign))
    if words:
        raise refused(Path(words), "pass overwrite=True")
    parts = held.model_parts()

    def held_of(name: str) -> Iterator[tuple[Numbers, Numbers, Tensor]]:
        part = parts.get(f"model.{name}")
        if part is not None and part.written:
            for box in part.boxes(mesh.layout, mesh.rank):
                yield box.offset, box.shape, box.of(part.local.detach())

    def gathered(name: str) -> Tensor:
        x, _ = tensors[name]
        source = (wholes if wholes is not None else held.params) if isinstance(x, Param) else held.buffers
        return x.by_name(gathered_entry(program, mesh, x, source))[name]

    for layout in layouts:
        write(layout, held_of, gathered, mesh, max_file_bytes)
    return [layout.folder for layout in layouts]


def foreign_weights(path: Path) -> Path | None:
    """Return a weight file at this path (folder or file) that shardc did not write, or None."""
    file = path
    try:
        # nothing is exported to a store; adapters beside a model would be added to it
        for file in () if isinstance(path, Url) else (*weight_files(path), *path.glob("adapter_model.*")):
            if file.suffix != ".safetensors" or not _MARK.items() <= (open_safetensors(file).metadata() or {}).items():
                return file
    except (ShardcError, OSError):  # an index without its files, a file that cannot be read
        return file
    return None


def refused(file: Path, how: str) -> ShardcError:
    """Build the error for foreign weights that would be replaced. how: how to allow it."""
    fault = f"the weights in {file.name} were not written by shardc, and would be replaced"
    return ShardcError(fault, where=str(file), fix=f"name another folder, or {how}")


# --- what is written --------------------------------------------------------------------------------------------------


def plan(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ties: Mapping[str, str],
    model: nn.Module | None,
    carried: Path | None,
    dtype: torch.dtype | None,
    program: Program | None = None,
    *,
    merge: bool = False,
) -> list[Layout]:
    """Plan the files for these tensors; several folders for a model with several adapters.

    tensors: {name: (global shape, dtype)}; ties: {other name: name}. The others are those of `export_safetensors`.
    """
    recorder, values = Recorder(), dict[str, Tensor]()
    carried = None if isinstance(carried, Url) else carried

    def read(name: str, *box: Numbers) -> Tensor:  # of what was gathered
        return values[name][index(*box)]

    on_tape = {
        n: recorder.stored(Sliced(shape, stored, functools.partial(read, n), name=n))
        for n, (shape, stored) in tensors.items()
    }
    single = path.suffix == ".safetensors"
    folder = path.parent if single else path

    def layout(at: Path, stem: str, saved: Mapping[str, Tensor], ties: Mapping[str, str], finish: Any) -> Layout:
        outputs = tuple(sorted((_output(n, x, recorder, dtype) for n, x in saved.items()), key=lambda x: x.of))
        if wide := {x.name: x.dtype for x in outputs if x.dtype not in NAMES}:
            fix = "save a checkpoint instead (engine.save), or train in complex64"
            kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in wide.values()}))
            raise ShardcError(f"safetensors files hold no {kinds}", where=", ".join(wide), fix=fix)
        metadata = {k: v for k, v in ties.items() if v in saved}
        return Layout(at, stem, outputs, recorder.tape, values, metadata, finish, path if single else None)

    named = {**on_tape, **{other: on_tape[name] for other, name in ties.items() if name in on_tape}}
    for exported in registered("runtime", "exported", program.features if program is not None else ()):
        with recorder.recording():
            named, write_config = exported(program, named, merge=merge)
        if not merge:
            finish = (lambda: None) if single else functools.partial(write_config, folder, carried)
            return [layout(folder, "adapter_model", named, {}, finish)]
    if not single and model is not None and is_adapted(model):
        return [layout(at, "adapter_model", saved, {}, finish) for at, saved, finish in _adapters(model, folder, named)]
    if not single and model is not None and "" in pretrained_modules(model):
        saved = _reverted(model, {n: named[n] for n in _distinct(model, named, ties)}, recorder)
        dtypes = {n: dtype or x.dtype for n, x in saved.items() if x.is_floating_point()}
        finish = functools.partial(_write_hf_files, model, folder, carried, dtypes)
        return [layout(folder, "model", saved, {}, finish)]
    return [layout(folder, "model", {n: x for n, x in named.items() if n not in ties}, ties, lambda: None)]


def _output(name: str, x: Tensor, recorder: Recorder, dtype: torch.dtype | None) -> Output:
    ref, tape = recorder.ref(x), recorder.tape
    written = dtype if dtype is not None and ref.dtype.is_floating_point else ref.dtype
    stored = (tape.entries[i].args[0] for i in tape.closure([ref.storage]) if tape.entries[i].func is None)
    read = tuple(x.name for x in stored if x.name)
    source = tape.source(ref)
    return Output(name, written, ref, read, source is not None and source.name != "")


def skeleton(model: nn.Module | None) -> nn.Module | None:
    """Return a model of transformers or peft without its weights, for an export; None for other models."""
    if model is None or not (is_adapted(model) or "" in pretrained_modules(model)):
        return None
    bare: dict[int, Any] = {}  # by the id of the original: tied weights and shared modules stay one object

    def without_values(x: Any) -> Any:
        if id(x) in bare:
            return bare[id(x)]
        if isinstance(x, Tensor):
            empty = torch.empty_like(x.detach(), device="meta")
            bare[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
        elif isinstance(x, nn.Module):
            bare[id(x)] = module = x.__class__.__new__(x.__class__)
            # not copy.deepcopy: modules also hold objects that cannot be copied, such as a lock
            module.__dict__.update({name: pytree.tree_map(without_values, value) for name, value in vars(x).items()})
        else:
            return x
        return bare[id(x)]

    return cast(nn.Module, without_values(model))


def is_adapted(model: nn.Module) -> bool:
    """Return whether it is a model with peft's adapters."""
    peft: ModuleType | None = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _adapters(
    model: Any, folder: Path, named: Mapping[str, Tensor]
) -> Iterator[tuple[Path, dict[str, Tensor], Callable[[], None]]]:
    """Yield (folder, tensors, function that writes the rest) of each adapter, as peft saves it."""
    from peft import get_peft_model_state_dict

    for name, config in model.peft_config.items():
        at = folder / name if name != "default" else folder
        tensors = get_peft_model_state_dict(model, dict(named), adapter_name=name, save_embedding_layers=False)
        inference = copy.deepcopy(config)
        inference.inference_mode = True
        yield at, tensors, functools.partial(inference.save_pretrained, at)


def _distinct(model: Any, named: Mapping[str, Tensor], ties: Mapping[str, str]) -> list[str]:
    """Return the names under which tensors are stored: all but those that transformers ties when it loads them."""
    dropped = set(getattr(model, "all_tied_weights_keys", None) or {})
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_save or ()]
    groups: dict[str, list[str]] = {}
    for name in named:
        groups.setdefault(ties.get(name, name), []).append(name)
    chosen = (n for names in groups.values() for n in [x for x in names if x not in dropped] or names[:1])
    return [n for n in chosen if not any(p.search(n) for p in ignored)]


def _reverted(model: Any, found: dict[str, Tensor], recorder: Recorder) -> dict[str, Tensor]:
    """Convert tensors to the form of transformers' own checkpoints of this model."""
    from transformers.core_model_loading import revert_weight_conversion

    with recorder.recording():
        return dict(revert_weight_conversion(model, found))


def _write_hf_files(model: Any, folder: Path, carried: Path | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """Write the files that are not weights. dtypes: of the stored tensors."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    _name_dtype(config, str(_loaded_as(model, dtypes)).removeprefix("torch."))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if tied and tied.keys() <= dtypes.keys():  # the model has them apart
        config.tie_word_embeddings = False
    _write_config(config, folder / "config.json")
    if model.can_generate() and model.generation_config is not None:
        _write_config(model.generation_config, folder / "generation_config.json")
    if carried is not None and carried.is_dir() and carried.resolve() != folder.resolve():
        for file in sorted(carried.iterdir()):
            if file.is_file() and CARRIED.fullmatch(file.name):
                shutil.copyfile(file, folder / file.name)
        if (templates := carried / "additional_chat_templates").is_dir():
            shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)


def _write_config(config: Any, file: Path) -> None:
    """Write a config of transformers, also one of values that it reads and refuses to write, after the whole run."""
    try:
        config.save_pretrained(file.parent)
    except ValueError:
        config.to_json_file(file, use_diff=True)


def _loaded_as(model: Any, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype in which transformers reads tensors of these dtypes, without rounding any."""
    for dtype in sorted({*dtypes.values()}, key=lambda x: x.itemsize):
        wider = model._get_dtype_plan(dtype)  # parts of names of weights that it keeps in float32
        if all(x == dtype or any(part in name for part in wider) for name, x in dtypes.items()):
            return dtype
    return functools.reduce(torch.promote_types, dtypes.values(), torch.float32)


def _name_dtype(config: Any, dtype: str) -> None:
    """Write a dtype into a config of transformers, and into those inside of it."""
    config.dtype = dtype
    for name in config.sub_configs:
        if hasattr(inside := getattr(config, name, None), "sub_configs"):
            _name_dtype(inside, dtype)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    layout: Layout, held: Held, gathered: Callable[[str], Tensor], mesh: Any, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a folder's files; each rank writes what it holds. They appear when complete. Collective.

    gathered: returns a whole tensor; all ranks call it in the same order.
    Raises ShardcError on all ranks. Old files are unchanged if writing failed; if a rename or a config failed, some are
    replaced.
    """
    files = layout.files(max_bytes)
    parts = [layout.folder / f".{layout.stem}-{i}.writing" for i in range(len(files))]
    metadata = {**layout.metadata, **_MARK}
    headers = [header([(x.name, x.dtype, x.ref.shape) for x in group], metadata) for group in files.values()]
    problem: Exception | None = None

    def tried(work: Callable[..., None], *args: Any) -> None:
        """Run it, unless an earlier write failed. Then only gathers go on, since all ranks take part in them."""
        nonlocal problem
        if problem is None:
            try:
                work(*args)
            except Exception as e:  # any, of a library's config too: other ranks wait
                problem = e

    if mesh.rank == 0:
        tried(_begin, layout.folder, parts, headers)
    _agree(mesh, problem, layout.folder)
    for group, part, (_, starts) in zip(files.values(), parts, headers, strict=True):
        opened: list[int] = []
        tried(lambda part: opened.append(os.open(part, os.O_WRONLY | os.O_CLOEXEC)), part)  # noqa: B023 (called at once)
        try:
            placed = list(zip(group, starts, strict=False))
            for each in _data(layout, placed, held, gathered, mesh.rank):
                tried(_write_slice, *opened, *each)
            tried(disk_calls.sync, *opened)
        finally:
            for descriptor in opened:
                os.close(descriptor)
    _agree(mesh, problem, layout.folder)
    if mesh.rank == 0:
        tried(_rename_files, layout, files, parts)
        tried(layout.finish)
        tried(disk_calls.sync_folder, layout.folder)
    _agree(mesh, problem, layout.folder)


def _begin(folder: Path, parts: Sequence[Path], headers: Sequence[tuple[bytes, list[int]]]) -> None:
    """Create files of their full length, with their headers."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, (first, starts) in zip(parts, headers, strict=True):
        part.unlink(missing_ok=True)
        disk_calls.write_file(part, first)
        os.truncate(part, starts[-1])


def _data(
    layout: Layout, outputs: Sequence[tuple[Output, int]], held: Held, gathered: Callable[[str], Tensor], rank: int
) -> Iterator[tuple[Output, int, Numbers, Numbers, Tensor]]:
    """Yield what this rank writes: (output, its first byte, offset and shape of a box, numbers).

    Computes what shares inputs together.
    """
    for (itself, names), group in itertools.groupby(outputs, lambda x: (x[0].itself, x[0].of)):
        together = list(group)
        if itself:
            for x, start in together:
                yield from ((x, start, *box) for box in held(x.of[0]))
            continue
        layout.values.update({name: gathered(name) for name in names})
        if rank == 0:
            computed = layout.tape.replay([x.ref for x, _ in together], None)
            yield from ((*pair, *whole(tuple(x.shape)), x) for pair, x in zip(together, computed, strict=True))
        layout.values.clear()


def _write_slice(descriptor: int, x: Output, first: int, offset: Numbers, shape: Numbers, data: Tensor) -> None:
    """Write a box of a tensor to its place in a file. first: where the tensor begins there."""
    length, starts = _stretches(x.ref.shape, offset, shape)
    size, memory = length * x.dtype.itemsize, bytes_of(data.to(device="cpu", dtype=x.dtype).contiguous())
    for i, start in enumerate(starts):
        disk_calls.write(descriptor, memory[i * size : (i + 1) * size], first + start * x.dtype.itemsize)


def _stretches(shape: Numbers, offset: Numbers, size: Numbers) -> tuple[int, list[int]]:
    """Return a box's contiguous parts in row-major order: (elements of each, where each begins)."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    inner = len(shape)
    while inner and (inner == len(shape) or size[inner] == shape[inner]):
        inner -= 1  # this dim's range is contiguous, as all dims after it are whole
    first = sum(map(operator.mul, offset[inner:], strides[inner:]))
    outer = itertools.product(*(range(a, a + n) for a, n in zip(offset[:inner], size[:inner], strict=True)))
    return math.prod(size[inner:]), [first + sum(map(operator.mul, at, strides)) for at in outer]


def _rename_files(layout: Layout, files: Mapping[Path, Sequence[Output]], parts: Sequence[Path]) -> None:
    """Rename the written files to their final names; remove those of an earlier export."""
    for part, final in zip(parts, files, strict=True):
        disk_calls.rename(part, final)
    if layout.single is not None:
        return
    new, index_file = {*files}, layout.folder / f"{layout.stem}.safetensors.index.json"
    if len(files) > 1:
        weight_map = {x.name: final.name for final, group in files.items() for x in group}
        metadata = {"total_size": sum(x.nbytes for x in layout.outputs)}
        index_file.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")
        new.add(index_file)
    # with a whole model no adapters stay: transformers would add them to its weights
    stems = ("model", "adapter_model", "adapter_config") if layout.stem == "model" else (layout.stem,)
    for file in layout.folder.iterdir():
        old = WEIGHTS.fullmatch(file.name) or file.name == "adapter_config.json"
        if old and file.name.startswith(stems) and file not in new:
            file.unlink()


def _agree(mesh: Any, problem: Exception | None, folder: Path) -> None:
    """Raise on all ranks if one of them could not write, with its message."""
    words_of = getattr(problem, "strerror", None) or str(problem)
    ranks, words = agreement.failures(mesh, None if problem is None else words_of)
    if ranks:
        if mesh.rank == 0 and folder.is_dir():
            for part in folder.glob(".*.writing"):
                part.unlink(missing_ok=True)
        fix = "name a folder with enough space that all ranks can write to"
        raise ShardcError(f"the weights cannot be written: {words}", where=str(folder), fix=fix) from problem
