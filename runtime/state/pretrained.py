"""Find a model's weights in files: prefixes, renames and conversions of checkpoints, and notes.

    file                                          model
    transformer.wte.weight                        base_model.model.transformer.wte.weight        (peft, a wrapper)
    layers.0.mlp.experts.3.gate_proj.weight ┐
    layers.0.mlp.experts.3.up_proj.weight   ┴──►  layers.0.mlp.experts.gate_up_proj[3]           (transformers)

transformers' own tables define how its checkpoints are converted. They run on tensors without memory, on a tape; then a
rank reads the slices that its part is made of (init_tape.py).
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.layer_names import of_every_layer
from shardc.runtime.state.boxes import in_memory
from shardc.runtime.state.fitting import check_tensors
from shardc.runtime.state.init_tape import RECORDING, Recorder
from shardc.runtime.state.torch_format import WRAPPER, WRAPPERS
from shardc.runtime.state.weight_files import WeightFiles, of_files
from shardc.runtime.storage.urls import Url
from shardc.torch_modes import untraced
from shardc.torch_private import pytree

#: Maximal number of names in an error or a note.
SHOWN = 4
#: Files belong to another model if at most one in FEW tensors fits, of the files or the model, whichever has fewer: a
#: name such as lm_head.weight is in all models. An adapter is few of a model's tensors, but all of its file's.
FEW = 8
#: The name of a tensor of an adapter: the module that it is beside, and what it is.
ADAPTER = re.compile(r"(.+?)(?:\.base_layer)*\.lora_(A|B|embedding_[AB]|magnitude_vector)(?:\..+)?")
#: What peft and wrappers add to names: the adapted layer, trained copies, the adapter's name; the wrapped module.
_PEFT = re.compile(rf"\.(?:base_layer|original_module|modules_to_save\.[^.]+|{WRAPPERS})(?=\.)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def folded(names: Collection[str]) -> str:
    """Fold names that differ in numbers only, with their count: "h.*.attn.weight (12), score.weight"."""
    groups = Counter(of_every_layer(n) for n in names)
    examples = {of_every_layer(n): n for n in names}
    shown = [f"{k} ({n})" if n > 1 else examples[k] for k, n in list(groups.items())[: 2 * SHOWN]]
    more = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state_dict without copies, under all names of tied tensors."""
    return {n: x for n, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}


def place(files: WeightFiles, model: nn.Module, recorder: Recorder) -> tuple[dict[str, Tensor], list[str]]:
    """Find the model's tensors in files: ({model name: tensor on the recorder's tape, without memory}, notes).

    All names of a tied tensor are there. model: on any device; only names, shapes and dtypes are read.
    Raises ShardcError if a tensor has another shape in the files, naming both, and if the files belong to another
    model.
    """
    want = named_state(model)
    on_tape = {x: recorder.stored(x) for x in dict.fromkeys(files.tensors.values())}
    saved = {WRAPPER.sub("", name): on_tape[x] for name, x in files.tensors.items()}
    mapped: dict[str, Any] = {}
    extra: list[str] = []
    library = pretrained_modules(model)
    if library:
        (prefix, module), *others = library.items()
        mapped, extra = _converted(module, prefix, want, saved, recorder, files)
        for other, part in others:
            more, extra = _converted(part, other, want, {n: saved[n] for n in extra if n in saved}, recorder, files)
            mapped |= more
        mapped |= {n: saved[n] for n in want if n not in mapped and n in saved}  # tensors outside of the library's part
        extra = [n for n in extra if n not in want]
    plain, left = _by_name(want, saved)
    if len(plain) > len(mapped):  # an adapter, a wrapper's whole state, a model that the library does not know
        mapped, extra = plain, left
    wanted, present = ({n: tuple(x[n].shape) for n in mapped} for x in (want, mapped))
    fix = "make the model with the config of these weights, or rename the new tensors"
    check_tensors(errors := Errors(), wanted, present, present, str(files.path), fix)
    errors.raise_any()
    if lost := [n for n in extra if ADAPTER.fullmatch(n)]:
        fault = f"the model has no adapters for {len(lost)} tensors of the file ({_names(lost)})"
        fix = "write them in `adapters` of the spec, with the modules, rank and alpha of adapter_config.json"
        raise ShardcError(fault, where=str(files.path), fix=fix)
    first = {id(want[n]): x for n, x in reversed(mapped.items())}
    missing = [n for n, x in want.items() if id(x) not in first]
    if len(mapped) * FEW <= min(len(files.tensors), len({id(x) for x in want.values()})):
        count = f"{len(mapped)} ({_names(mapped)})" if mapped else "none"
        fault = f"{count} of the file's {len(files.tensors)} tensors ({_names(files.tensors)}) is in the model"
        fix = "compile the model that these weights belong to"
        if mapped:
            fix += ", or load only the tensors that it has: program.engine(model, weights={name: tensor})"
        raise ShardcError(f"{fault}, which has {_names(want)}", where=str(files.path), fix=fix)
    notes = _notes(files, want, len(mapped), missing, extra)
    # a tied tensor may be in the files under any of its names: use it for all of them, or the others would keep their
    # initial values
    return mapped | {n: first[id(x)] for n, x in want.items() if n not in mapped and id(x) in first}, notes


def _notes(
    files: WeightFiles, want: Mapping[str, Tensor], read: int, missing: Collection[str], extra: Collection[str]
) -> list[str]:
    """Return notes for the user. read: how many of the model's tensors the files have; missing, extra: names."""
    dtypes = sorted({_name(x.dtype) for x in want.values() if x.is_floating_point()})
    stored = Counter(_name(x.dtype) for x in dict.fromkeys(files.tensors.values()) if x.dtype.is_floating_point)
    lines = [f"weights: {read} tensors of {files.path} ({files.what})"]
    other = {dtype: n for dtype, n in stored.items() if dtype not in dtypes}
    lines += [f"{n} of them are stored as {dtype} and held as {', '.join(dtypes)}" for dtype, n in other.items()]
    if missing:
        lines.append(f"not in the files, and initialised by the model: {folded(missing)}")
    if extra:
        lines.append(f"in the files, and not in the model: {folded(extra)}")
    return lines


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")


# --- plain names ------------------------------------------------------------------------------------------------------


def _by_name(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Match tensors by name, ignoring peft's additions and a prefix of a wrapper or an outer model."""
    names = best_names(own, found)
    used = set(names.values())
    return {n: found[k] for n, k in names.items()}, [k for k in found if k not in used]


def best_names(own: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return {model name: file name} of those that are found, in the spelling that finds most."""
    best: dict[str, str] = {}
    for renamed in _spellings(own, found):
        mapped = {n: k for n, k in renamed.items() if k in found}
        if len(mapped) > len(best):
            best = mapped
    return best


def _spellings(own: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield {model name: possible file name}: unchanged, without peft's additions, with other prefixes."""
    plain = {n: _PEFT.sub("", n) for n in own}
    yield {n: n for n in own}
    yield plain
    adapted = {n: k for n, k in plain.items() if ".original_module." not in n}
    yield {n: re.sub(r"\.(lora_\w+|vera_\w+)\.[^.]+(?=\.|$)", r".\1", k) for n, k in adapted.items()}
    for prefix in _prefixes(plain.values(), found):
        yield {n: k.removeprefix(prefix) for n, k in plain.items() if k.startswith(prefix)}
    for prefix in _prefixes(found, plain.values()):
        yield {n: prefix + k for n, k in plain.items()}


def _prefixes(longer: Iterable[str], shorter: Iterable[str]) -> list[str]:
    """Return prefixes before names of `shorter` in those of `longer`, the most frequent first."""
    short = set(shorter)
    counts: Counter[str] = Counter()
    for name in longer:
        for i, c in enumerate(name):
            if c == "." and name[i + 1 :] in short:
                counts[name[: i + 1]] += 1
    return [prefix for prefix, _ in counts.most_common(2)]


# --- transformers -----------------------------------------------------------------------------------------------------


def pretrained_modules(model: nn.Module) -> dict[str, Any]:
    """Return the outermost modules of the transformers library, by name: "" for the model itself."""
    library: ModuleType | None = sys.modules.get("transformers.modeling_utils")
    if library is None or "transformers.core_model_loading" not in sys.modules:
        return {}
    modules: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(outer + ".") for outer in modules)
        if isinstance(module, library.PreTrainedModel) and not inside:
            modules[name] = module
    return modules


def _converted(
    module: Any,
    prefix: str,
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    recorder: Recorder,
    files: WeightFiles,
) -> tuple[dict[str, Tensor], list[str]]:
    """Convert a transformers module's tensors as it would itself: ({model name: tensor}, unused names)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    before = prefix + "." if prefix else ""
    inside = {n: _PEFT.sub("", n.removeprefix(before)) for n in own if n.startswith(before)}
    stand_in = _tree({plain: own[n] for n, plain in inside.items()})
    vars(stand_in).update(base_model_prefix=module.base_model_prefix, config=module.config)
    tensors = {n.removeprefix(before): x for n, x in found.items()}
    info = load_converted(stand_in, tensors, get_model_conversion_mapping(module), recorder, str(files.path))
    other = {name: shape for name, shape, _ in info.mismatched_keys}
    loaded = named_state(stand_in)
    mapped = {n: loaded[k] for n, k in inside.items() if k not in info.missing_keys and k not in other}
    for n, k in inside.items():
        if k in other:
            mapped[n] = torch.empty(other[k], device="meta")  # its shape is reported with the others
    extra = [n for n in info.unexpected_keys if not _ignored(module, n)]
    return mapped, sorted(extra)


def _ignored(module: Any, name: str) -> bool:
    """Return whether the model ignores this name in checkpoints."""
    patterns = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(p, name) for p in patterns)


def hf_builder(folder: Path) -> Callable[[], nn.Module] | None:
    """Return a builder, without weights, for a folder of the transformers library; None for other folders."""
    config_file = folder / "config.json"
    if isinstance(folder, Url) or not config_file.is_file() or "architectures" not in config_file.read_text():
        return None
    try:
        import transformers
    except ImportError:
        return None
    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0]
    if not hasattr(transformers, name):
        return None
    return lambda: getattr(transformers, name)._from_config(config)


def load_converted(
    module: Any, given: Mapping[str, Tensor], mapping: Sequence[Any], recorder: Recorder, where: str, config: Any = None
) -> Any:
    """Run transformers' loader on recorded tensors, without threads, which a recorder would not see.

    Returns its report: missing_keys, unexpected_keys, mismatched_keys.
    """
    from transformers import core_model_loading
    from transformers.modeling_utils import LoadStateDictConfig

    config = config or LoadStateDictConfig(weight_mapping=list(mapping))
    quiet = mock.patch.object(core_model_loading, "tqdm", lambda items, **_: items)
    with recorder.recording(), mock.patch.dict("os.environ", HF_DEACTIVATE_ASYNC_LOAD="1"), quiet:
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(
            model=module, state_dict=dict(given), load_config=config, disk_offload_index=None
        )
    if info.conversion_errors:
        name, message = next(iter(info.conversion_errors.items()))
        fix = "load the folder with transformers, save it with save_pretrained(..., save_original_format=False)"
        raise ShardcError(f"transformers cannot convert {name}: {message}", where=where, fix=fix)
    return info


def _tree(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build modules without a forward that hold tensors of these names, on the meta device."""
    root = nn.Module()
    for name, x in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
        if isinstance(x, nn.Parameter):
            at.register_parameter(last, nn.Parameter(empty, requires_grad=False))
        else:
            at.register_buffer(last, empty)
    return root


# --- calls that read weights inside a model's builder, answered without reading


@contextmanager
def lazily(recorder: Recorder | None) -> Iterator[None]:
    """Make builders read tensors without memory from files, in this context.

    recorder: on whose tape; None: nobody will need their values.
    """
    recorder = recorder if recorder is not None else Recorder()
    thread = [threading.get_ident()]  # in which the builder runs: others may read files too
    with RECORDING, ExitStack() as stack:
        # a module that the builder imported first (`from safetensors import safe_open`) keeps a replacement
        stack.callback(thread.clear)

        def replace(
            place: Any, name: str, new: Callable[..., Any], kind: Callable[..., Any] = lambda call: call
        ) -> None:
            """Replace a function by new(recorder, the function) in this thread."""
            original = getattr(getattr(place, name), "__func__", getattr(place, name))
            changed = new(recorder, original)

            def call(*args: Any, **kwargs: Any) -> Any:
                return (changed if thread == [threading.get_ident()] else original)(*args, **kwargs)

            stack.enter_context(mock.patch.object(place, name, kind(call)))

        def replace_transformers(library: ModuleType) -> None:
            model = getattr(library, "PreTrainedModel", None)
            if hasattr(model, "_load_pretrained_model"):
                replace(model, "_load_pretrained_model", _load_pretrained, staticmethod)
                replace(model, "from_pretrained", _from_pretrained, classmethod)
                replace(model, "get_init_context", functools.partial(_init_context, library), classmethod)

        replace(torch, "load", _load)
        for module in (safetensors, safetensors.torch):
            replace(module, "safe_open", lambda recorder, _: functools.partial(_Opened, recorder))
        _once_imported("transformers.modeling_utils", replace_transformers, stack)
        yield


def _once_imported(name: str, then: Callable[[ModuleType], None], stack: ExitStack) -> None:
    """Call `then` with a module: now if it is imported, else when the builder imports it.

    transformers imports it when one of its models is looked up.
    """
    if (module := sys.modules.get(name)) is not None:
        then(module)
        return

    class Finder(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(fullname, path, target) if fullname == name else None
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    run(module)
                    if finder in sys.meta_path:  # another thread's import may end after the builder
                        then(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, finder := Finder())
    stack.callback(sys.meta_path.remove, finder)


def _load(recorder: Recorder, torch_load: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch.load: its tensors are mapped into memory, and are on the tape."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            loaded = untraced(lambda: torch_load(f, "cpu", *args, **{**kwargs, "mmap": True}))
        except (RuntimeError, ValueError):  # no file's path, or an old format: it is read as a whole
            loaded = untraced(lambda: torch_load(f, "cpu", *args, **kwargs))
        seen: dict[tuple[int, Any, Any, Any], Tensor] = {}

        def stored(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_quantized:
                return x
            key = x.data_ptr(), x.dtype, x.shape, x.stride()  # a tied weight stays one
            if key not in seen:
                seen[key] = recorder.stored(in_memory(x))
            return seen[key]

        return pytree.tree_map(stored, loaded)

    return load


def _from_pretrained(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers must see the CPU, even if the builder runs on the meta device
        with torch.device("cpu"), recorder.recording():
            return original(cls, *args, **kwargs)

    return from_pretrained


def _init_context(library: Any, _: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `from_pretrained` skip initialisation, as on the meta device, which a recorder hides."""
    return lambda *args, **kwargs: [*original(*args, **kwargs), library.init.no_init_weights()]


def _load_pretrained(recorder: Recorder, _: Callable[..., Any]) -> Callable[..., Any]:
    """Replace how `from_pretrained` loads weights into a model."""

    def load(
        model: Any, state_dict: Mapping[str, Any] | None, files: list[str] | None, config: Any, *_: Any
    ) -> tuple[Any, None]:
        where = str(config.pretrained_model_name_or_path)
        if config.hf_quantizer is not None:
            fault = "the weights are quantised, which shardc cannot train"
            fix = "load weights that are not quantised, or fine-tune them elsewhere"
            raise ShardcError(fault, where=where, fix=fix)
        if state_dict is None:
            weights = of_files(Path(where), [Path(f) for f in files or ()])
            state_dict = {name: recorder.stored(x) for name, x in weights.tensors.items()}
        info = load_converted(model, state_dict, (), recorder, where, config=config)
        loaded = len(model.state_dict()) - len(info.missing_keys)
        recorder.notes.append(f"weights: {loaded} tensors of {where} (from_pretrained)")
        recorder.folder = Path((files or [where])[0]).parent
        if tied := info.missing_keys - set(model.all_tied_weights_keys):
            recorder.notes.append(f"not in the files, and initialised by the model: {folded(sorted(tied))}")
        return info, None

    return load


class _Opened(AbstractContextManager["_Opened"]):
    """Replaces safetensors.safe_open: its tensors are on a tape. A slice is a tensor, to be indexed."""

    def __init__(self, recorder: Recorder, filename: Any, *_: Any, **__: Any) -> None:
        self._recorder, self._files = recorder, of_files(Path(filename), [Path(filename)])

    def keys(self) -> list[str]:
        return list(self._files.tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._recorder.stored(self._files.tensors[name])

    offset_keys, get_slice = keys, get_tensor

    def __exit__(self, *_: object) -> None:
        pass

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self._files.tensors}
