"""Calls that read weights inside a model's builder, answered without reading: `from_pretrained`, `torch.load`,
`load_file`, `safe_open`.

    def model():
        m = AutoModelForSequenceClassification.from_pretrained("pretrained/", num_labels=3)
        m.load_state_dict(torch.load("more.pt"), strict=False)
        return m

A builder runs without memory, to compile or to be recorded. What it reads are then tensors without memory as well: on
the recorder's tape they stand for those of the file, of which each rank later reads its slices.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.state.init_recorder import RECORDING, Recorder
from shardc.runtime.state.pretrained import folded, load_converted
from shardc.runtime.state.sliced_tensors import InMemory
from shardc.runtime.state.weight_files import WeightFiles, of_files
from shardc.torch_modes import untraced
from shardc.torch_private import pytree


@contextmanager
def lazily(recorder: Recorder | None) -> Iterator[None]:
    """While open, what builders read from files are tensors without memory. recorder: on whose tape; None: nobody will
    want their values."""
    own = recorder if recorder is not None else Recorder()
    calls = _Calls(own)
    with RECORDING, ExitStack() as stack:
        stack.callback(calls.close)
        stack.enter_context(mock.patch.object(torch, "load", calls.load(torch.load)))
        for module in (safetensors, safetensors.torch):
            stack.enter_context(mock.patch.object(module, "safe_open", calls.only_here(calls.open, module.safe_open)))
        _once_imported("transformers.modeling_utils", lambda library: _replace(library, calls, stack), stack)
        yield


def _replace(library: ModuleType, calls: _Calls, stack: ExitStack) -> None:
    """transformers' way from files into a model."""
    model = getattr(library, "PreTrainedModel", None)
    if model is None or not hasattr(model, "_load_pretrained_model"):
        return
    read = staticmethod(calls.only_here(calls.load_pretrained, model._load_pretrained_model))
    stack.enter_context(mock.patch.object(model, "_load_pretrained_model", read))
    build = classmethod(calls.from_pretrained(model.from_pretrained.__func__))
    stack.enter_context(mock.patch.object(model, "from_pretrained", build))
    contexts = classmethod(calls.uninitialised(model.get_init_context.__func__, library.init.no_init_weights))
    stack.enter_context(mock.patch.object(model, "get_init_context", contexts))


def _once_imported(name: str, then: Callable[[ModuleType], None], stack: ExitStack) -> None:
    """Call `then` with a module: now if it is imported, else when the builder imports it. transformers imports the
    modules of its models no sooner than one of them is asked for, which may be in the builder.
    """
    if (module := sys.modules.get(name)) is not None:
        then(module)
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)


class _Finder(MetaPathFinder):
    """Finds one module where it is, and calls `then` when it has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.name else None
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:  # an import that another thread began may end after the builder
                self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Calls:
    """What the calls do instead, in the thread in which the builder runs."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._thread: int | None = threading.get_ident()

    def close(self) -> None:
        """The calls are again what they replace. A module that the builder was the first to import (`from safetensors
        import safe_open`) keeps them for good.
        """
        self._thread = None

    def only_here(self, function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """The function in this thread, and what it replaces in all others, which may read files as well, and later."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() == self._thread else original)(*args, **kwargs)

        return call

    def load(self, torch_load: Callable[..., Any]) -> Callable[..., Any]:
        """torch.load: its tensors are mapped into memory, and stand on the tape."""

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            try:
                held = untraced(lambda: torch_load(f, "cpu", *args, **{**kwargs, "mmap": True}))
            except (RuntimeError, ValueError):  # no file's path, or an old format: it is read as a whole
                held = untraced(lambda: torch_load(f, "cpu", *args, **kwargs))
            seen: dict[tuple[int, Any, Any, Any], Tensor] = {}

            def stored(x: Any) -> Any:
                if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_quantized:
                    return x
                key = x.data_ptr(), x.dtype, x.shape, x.stride()  # a tied weight stays one
                if key not in seen:
                    seen[key] = self.recorder.stored(InMemory(x))
                return seen[key]

            return pytree.tree_map(stored, held)

        return self.only_here(load, torch_load)

    def open(self, filename: Any, framework: str = "pt", device: Any = "cpu", **_: Any) -> _Opened:
        """safetensors.safe_open, which load_file calls as well."""
        return _Opened(self.recorder, of_files(Path(filename), [Path(filename)]))

    def from_pretrained(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            # on the CPU, as far as transformers can see, also where the builder runs on the meta device
            with torch.device("cpu"), self.recorder.recording():
                return original(cls, *args, **kwargs)

        return self.only_here(from_pretrained, original)

    def uninitialised(self, original: Callable[..., Any], without: Callable[[], Any]) -> Callable[..., Any]:
        """While `from_pretrained` makes the model: weights are not initialised yet. It would see that from the meta
        device, which a recorder hides."""
        return self.only_here(lambda *args, **kwargs: [*original(*args, **kwargs), without()], original)

    def load_pretrained(
        self, model: Any, state_dict: Mapping[str, Any] | None, files: list[str] | None, config: Any, *_: Any
    ) -> tuple[Any, None]:
        """How `from_pretrained` puts weights into a model."""
        if config.hf_quantizer is not None:
            what = "the weights are quantized, which shardc cannot train"
            fix = "load weights that are not quantized, or fine-tune them elsewhere"
            raise ShardcError(what, where=str(config.pretrained_model_name_or_path), fix=fix)
        where = str(config.pretrained_model_name_or_path)
        if state_dict is None:
            found = of_files(Path(where), [Path(f) for f in files or ()])
            state_dict = {name: self.recorder.stored(x) for name, x in found.tensors.items()}
        info = load_converted(model, state_dict, (), self.recorder, where, config=config)
        loaded = len(model.state_dict()) - len(info.missing_keys)
        self.recorder.notes.append(f"weights: {loaded} tensors of {where} (from_pretrained)")
        self.recorder.folder = Path((files or [where])[0]).parent
        if tied := info.missing_keys - set(model.all_tied_weights_keys):
            self.recorder.notes.append(f"not in the files, and initialised by the model: {folded(sorted(tied))}")
        return info, None


class _Opened:
    """An open safetensors file, whose tensors stand on a tape."""

    def __init__(self, recorder: Recorder, files: WeightFiles) -> None:
        self._recorder, self._files = recorder, files

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._files.tensors)

    offset_keys = keys

    def metadata(self) -> dict[str, str]:
        return {"format": "pt", **self._files.ties}

    def get_tensor(self, name: str) -> Tensor:
        return self._recorder.stored(self._files.tensors[name])

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> Tensor:
        """A tensor that can be indexed, as a slice can."""
        return self.get_tensor(name)
