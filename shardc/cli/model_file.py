"""Read model files (docs/how-to/training.md), or build a transformers model from its config alone.

model.py             model(), batch(); optional loss, outputs, data, collate, optimizer, scheduler, callbacks, weights
model.py:name        another builder than `model`
hf:config.json       transformers' AutoModelForCausalLM of that config; hf:ClassName:config.json another class
hf:DIR               the model of a folder, and its weights if it has any
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from shardc.artifact.model_source import WHOLE
from shardc.cli import config_file, hidden_modules
from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest
from shardc.ir.source import is_users
from shardc.optional import install, needed
from shardc.runtime.data.samples import is_map_style
from shardc.runtime.launch import short_sockets
from shardc.runtime.state.pretrained import lazily
from shardc.runtime.state.weight_files import has_weights, no_weights, unread
from shardc.runtime.storage import disk_calls

#: Arguments of data() for the number of this rank's part, and the number of parts.
PARTS = ("part", "parts")
#: Optional functions of a model file besides model() and batch(), with the arguments of each. data() may take two more,
#: PARTS: then it returns this rank's part of each global batch.
OPTIONAL = {
    "loss": ("output", "batch"),
    "outputs": ("output", "batch"),
    "data": ("split",),
    "collate": ("samples",),
    "optimizer": ("params",),
    "scheduler": ("optimizer",),
    "callbacks": (),
}
#: Words in torch's errors when a model without weights is moved, or the machine lacks the device.
_OF_DEVICE = re.compile(r"CUDA|meta tensor|HIP|No NVIDIA|device", re.IGNORECASE)
_SCRIPT = '`if __name__ == "__main__":`'
#: Fixes of model(): for a wrapper such as DistributedDataParallel, and for code that reads values.
_WRAPPED = "remove the wrapper: model() returns the plain model, which `mesh: {dp: ...}` of the spec distributes"
_VALUES = "remove code that reads values: model() runs without them, and each rank makes or reads its part later"


@dataclass(frozen=True)
class ModelFile:
    """A model and what trains it: the functions of a model file, None where the file has none.

    ref: the reference, with an absolute path. build: makes the module on the default device. batch: one global batch.
    outputs: what a forward-only program returns. The fields below are for `run`. data: split -> an iterable of global
    batches, or a map-style torch Dataset of samples (collate makes batches of them); or (split, part, parts) -> an
    iterable of that part of each global batch. optimizer: (name, parameter) pairs -> torch optimizer. scheduler:
    optimizer -> learning-rate scheduler. callbacks: returns them (shardc.runtime.checks.callbacks). weights: where
    training starts (a file or folder of shardc.runtime.state.weight_files); None: with the weights that `build` makes.
    note: a line about that for the user.
    """

    ref: str
    build: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    outputs: Callable[[Any, Any], Any] | None = None
    data: Callable[..., Iterable[Any] | Dataset[Any]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    callbacks: Callable[[], Iterable[Any]] | None = None
    weights: Path | None = None
    note: str = ""

    def on_meta(self) -> nn.Module:
        """Build the model without weights, on the meta device. Compiling needs no more."""
        with torch.device("meta"), lazily(None):
            return self.build()


def load(
    ref: str, *, batch: int | None = None, seq: int | None = None, seed: int = 0, data: str | None = None
) -> ModelFile:
    """Read a model reference. Raises ShardcError, with file and line, for each fault in the file.

    batch, seq: sizes of the example batch of an `hf:` model. data: what such a model is trained on: a Python file with
    data(split), and what else of OPTIONAL it needs, or a .jsonl file of conversations. seed: seeds `random`, numpy and
    torch before the file's model() and batch(), so that all ranks get the same result.
    """
    if ref.startswith("hf:"):
        file = _transformers(ref, batch or 8, seq or 128)
        return file if data is None else _with_data(file, data, batch or 8, seq, seed)
    if batch is not None or seq is not None or data is not None:
        fault = "--batch, --seq and --data belong to hf: models; batch() and data() of a model file say it"
        raise ShardcError(fault, where=ref, fix="leave them out, or edit batch() and data()")
    path = _existing(path_of(ref), ref)
    builder = "" if ref.endswith(".py") else ref.partition(":")[2]
    module = _import(path)
    build = _function(module, path, builder or "model", needed="returns the nn.Module")
    make_batch = _function(module, path, "batch", needed="returns one global batch")
    assert build is not None
    assert make_batch is not None

    def checked() -> nn.Module:
        with _users(path, f"{builder or 'model'}()"):
            before = torch.get_rng_state()
            seed_everything(seed)
            torch.manual_seed(seed)  # as a user would before model() on one device
            model = build()
            torch.set_rng_state(before)
        if not isinstance(model, nn.Module):
            fault = f"{builder or 'model'}() returns a {type(model).__name__}"
            raise ShardcError(fault, where=str(path), fix="return an nn.Module")
        return model

    with _users(path, "batch()"):
        seed_everything(seed)
        example = make_batch()
    if not isinstance(example, (dict, tuple, list, Tensor)):
        fault = f"batch() returns a {type(example).__name__}"
        raise ShardcError(fault, where=str(path), fix="return a dict (keyword arguments), a tuple or a tensor")
    optional = _optional(module, path)
    full = f"{path.resolve()}{':' + builder if builder else ''}"
    return ModelFile(full, checked, example, **optional, weights=_weights(vars(module).get("weights"), path))


def _optional(module: ModuleType, path: Path) -> dict[str, Any]:
    """Return the functions of OPTIONAL, None for each that the file does not have."""
    more = {"data": PARTS} if takes_parts(getattr(module, "data", None)) else {}
    return {
        name: _function(module, path, name, *arguments, *more.get(name, ())) for name, arguments in OPTIONAL.items()
    }


def _weights(named: Any, path: Path) -> Path | None:
    """Return the path in `weights = "..."` of a model file, from its folder or the current one.

    Another value of that name, such as class weights of a loss, is ignored; a state_dict is refused.
    """
    if isinstance(named, Mapping) and any(isinstance(x, Tensor) for x in named.values()):
        fix = 'write `weights = "FOLDER or FILE"`: each rank then reads its part; or load_state_dict in model()'
        raise ShardcError("weights is a state_dict, not the path of one", where=str(path), fix=fix)
    if not isinstance(named, (str, Path)):
        return None
    file = disk_calls.expanded(named)
    beside = path.resolve().parent / file
    return beside if beside.exists() else file.resolve()


def imported(ref: str) -> ModuleType:
    """Run a Python file that registers ops or rules, without model(). Raises ShardcError as `load` does."""
    return _import(_existing(ref, ref, "file", "a Python file that registers rules"))


def seed_everything(*numbers: int) -> None:
    """Seed `random`, numpy and torch, from any whole numbers, such as (seed, epoch)."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def takes_parts(data: Any) -> bool:
    """Return whether a model file's data() takes the number of this rank's part, and the number of parts."""
    return inspect.isfunction(data) and set(PARTS) <= set(inspect.signature(data).parameters)


def path_of(ref: str) -> str:
    """Return the Python file of a model reference; "" for a config of transformers."""
    return "" if ref.startswith("hf:") else ref if ref.endswith(".py") else ref.partition(":")[0]


def source_of(ref: str) -> Path:
    """Return the file of a model reference: Python, or a config.json, which may be missing."""
    if not ref.startswith("hf:"):
        return Path(path_of(ref))
    path = Path(ref.rpartition(":")[2])
    return path / "config.json" if path.is_dir() else path


def captured(ref: str) -> tuple[str, ...]:
    """Return the names in a model file that a program is compiled from; for a config, all of it."""
    if ref.startswith("hf:"):
        return (WHOLE,)
    builder = "" if ref.endswith(".py") else ref.partition(":")[2]
    return builder or "model", "loss", "outputs"


def _existing(
    name: str,
    ref: str,
    kind: str = "model file",
    wanted: str = "a Python file with model() and batch(), or hf:config.json",
) -> Path:
    path = Path(name)
    if not path.is_file():
        dotted = f"{name.replace('.', '/')}.py"  # as for `python -m`
        others = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = dotted if Path(dotted).is_file() else nearest(path.name, others)
        fix = f"did you mean {path.parent / near}?" if near else f"name {wanted}"
        raise ShardcError(f"there is no {kind} {name}", where=ref, fix=fix)
    if path.suffix in (".yaml", ".yml"):
        fix = f"the model file comes first, then the spec: shardc ... model.py {path.name}"
        raise ShardcError(f"this is a spec, not a {kind}", where=ref, fix=fix)
    if path.name == "config.json":
        raise ShardcError("this is a config of transformers", where=ref, fix=f"write hf:{ref}")
    if path.suffix != ".py":
        raise ShardcError(f"a {kind} ends in .py", where=ref, fix=f"name {wanted}")
    hidden_modules.check([path])
    return path


#: All modules made from files. torch unregisters a custom op when the object that defined it is collected, even if a
#: new object has replaced it: a file that is read twice would lose its ops later.
_IMPORTED: list[ModuleType] = []


def _import(path: Path) -> ModuleType:
    name, root = _module_name(full := path.parent.resolve() / path.name)
    if sys.path[:1] != [str(root)]:  # it stays there: processes that the file starts import it by that name
        sys.path.insert(0, str(root))
    if (old := sys.modules.get(name)) in _IMPORTED or getattr(old, "__file__", None) != str(full):
        sys.modules.pop(name, None)
    short_sockets()
    with _users(path, "importing it"):
        try:
            if package := name.rpartition(".")[0]:
                importlib.import_module(package)  # which may import the file, too
            if (module := sys.modules.get(name)) is None:
                spec = importlib.util.spec_from_file_location(name, path)
                assert spec is not None
                assert spec.loader is not None
                sys.modules[name] = module = importlib.util.module_from_spec(spec)
                _IMPORTED.append(module)
                spec.loader.exec_module(module)
        except SyntaxError as e:
            file = str(path) if e.filename and Path(e.filename).resolve() == path.resolve() else e.filename
            code = f" ({e.text.strip()})" if e.text and e.text.strip() else ""
            where = f"{file}:{e.lineno}:{e.offset}" if e.lineno else str(file)
            raise ShardcError(f"not Python: {e.msg}{code}", where=where, fix="correct that line") from None
    return module


def _module_name(path: Path) -> tuple[str, Path]:
    """Return the name by which another process can import a file, and the folder that it searches for it.

    A file that imports from its own package, by dots or by the package's name, is a module of it, as for `python -m`;
    the folders need no __init__.py. Any other is a module of its folder, as for `python FILE`.
    """
    text, folders = path.read_text(errors="replace"), path.parents
    dots = map(len, re.findall(r"^\s*from\s+(\.+)", text, re.MULTILINE))
    named = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))

    def is_package(f: Path) -> bool:
        places = _places(f.name)
        return _holding(f.name, path) == f.parent and (not places or str(f) in places)

    own = [i for i, f in enumerate(folders, 1) if f.name in named and is_package(f)]
    depth = min(max([0, *dots, *own]), len(folders) - 1)
    while depth and (folders[depth] / "__init__.py").exists():
        depth += 1
    hidden_modules.check(folders[:depth][-1:])
    other = path.stem in sys.stdlib_module_names or not all(map(is_users, _places(path.stem)))
    if not depth and (other or path.with_suffix("").is_dir()):
        return f"shardc_model_{path.stem}", folders[0]
    return ".".join([*(f.name for f in reversed(folders[:depth])), path.stem]), folders[depth]


def _holding(name: str, path: Path) -> Path | None:
    """Return the nearest folder around a file that holds another module, or a package, of this name."""
    for folder in path.parents:
        file = folder / f"{name}.py"
        if (folder / name).is_dir() or (file != path and file.is_file()):
            return folder
    return None


def _places(name: str) -> list[str]:
    """Return the file and the folders that `import name` takes now."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that a program has made
        return []
    return [p for p in (spec.origin, *(spec.submodule_search_locations or ())) if p] if spec is not None else []


class _Joins(Exception):
    """A model file calls init_process_group: torch would wait for ranks, and hang."""


@contextmanager
def _users(path: Path, doing: str) -> Iterator[None]:
    """Turn exceptions of the user's code into a ShardcError at the innermost line of the user's file."""
    try:
        joins = _Joins("shardc run joins the world itself, after it has read this file")
        with mock.patch.object(torch.distributed, "init_process_group", side_effect=joins):
            yield
    except ShardcError:
        raise
    except (Exception, SystemExit) as e:  # the user's code may raise any exception; --debug shows the cause
        frames = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).resolve() == path.resolve()]
        where = f"{path}:{frames[-1].lineno}" if frames else str(path)
        line, text = (frames[-1].line or "") if frames else "", str(e).strip()
        moves = re.search(r"\.(cuda|to|to_empty)\(", line) and _OF_DEVICE.search(text)
        missing = str(getattr(e, "name", "")).partition(".")[0]
        around = _holding(missing, path.resolve()) if isinstance(e, ModuleNotFoundError) else None
        fixes = (
            (around, f"PYTHONPATH={around} shardc ...: that folder holds {missing}"),
            ("attempted relative import" in text, f"write `from .module import ...` in {path.name}, too"),
            (isinstance(e, ModuleNotFoundError), f"{install(missing)}, or put that module beside {path.name}"),
            (isinstance(e, SystemExit), f"put what only a script does under {_SCRIPT}"),
            (isinstance(e, _Joins), f"leave it out; put what the file needs as a script under {_SCRIPT}"),
            (moves, "leave out .cuda() and .to(device): each rank builds its part on its own device"),
            ("Default process group has not been initialized" in text, _WRAPPED),
            ("meta tensor" in text, _VALUES),
            (True, "correct what that line does; --debug shows the whole traceback"),
        )
        fix = next(fix for applies, fix in fixes if applies)
        fault = f"{doing} raises {type(e).__name__}{f': {text.splitlines()[0]}' if text else ''}"
        if isinstance(e, _Joins):
            fault = f"init_process_group: {e}"
        raise ShardcError(f"{fault} ({line})" if line else fault, where=where, fix=fix) from e


def _function(
    module: ModuleType, path: Path, name: str, *arguments: str, needed: str = ""
) -> Callable[..., Any] | None:
    """Return a function of the file that takes these arguments, or None if it is missing and not `needed`."""
    function = getattr(module, name, None)
    if name == "callbacks" and isinstance(function, (list, tuple)):
        return lambda: function
    if function is None and needed:
        makers = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        near = nearest(name, makers, cutoff=0.5)
        fix = f"define {name}(): it {needed}"
        if near:
            fix += f"; there is {near}()"
        elif makers and name != "batch":
            fix += f"; or name the function that makes it, {path}:NAME, of {', '.join(makers[:8])}"
        raise ShardcError(f"the file has no {name}()", where=str(path), fix=fix)
    if isinstance(function, nn.Module) and name not in OPTIONAL:
        fault, kind = f"{name} is a model, not a function that makes one", type(function).__name__
        fix = f"write `def {name}(): return {kind}(...)`: each rank builds its own part"
        raise ShardcError(fault, where=str(path), fix=fix)
    if function is not None and not callable(function):
        fix = f"write `def {name}(...)`, which returns it"
        raise ShardcError(f"{name} is a {type(function).__name__}, not a function", where=str(path), fix=fix)
    if inspect.isfunction(function):  # a class, or an object that can be called, may have no signature to read
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments)
        except TypeError as e:
            call = f"{name}({', '.join(arguments)})"
            fault = f"{name}{signature} cannot be called as {call}: {e}"
            fix = f"write `def {call}`"
            raise ShardcError(fault, where=f"{path}:{function.__code__.co_firstlineno}", fix=fix) from None
    return function


def _transformers(ref: str, batch: int, seq: int) -> ModelFile:
    cls, _, file = ref.removeprefix("hf:").rpartition(":")
    try:
        import transformers
    except ImportError:
        raise ShardcError("hf: models need transformers", where=ref, fix=install("transformers")) from None
    path = config_file.path_of(file, ref)
    folder = path.parent if path != Path(file) else None  # a folder was named, or a model of the hub
    values = config_file.read(path, file, ref)
    if not isinstance(values, dict) or "model_type" not in values:
        raise ShardcError("the config has no model_type", where=file, fix='add "model_type": "llama", for example')
    if cls and not hasattr(transformers, cls):
        near = nearest(cls, [n for n in dir(transformers) if n.startswith(cls[:3])])
        fix = f"did you mean {near}?" if near else "see transformers' list of models"
        raise ShardcError(f"transformers has no {cls}", where=ref, fix=fix)
    try:
        config = transformers.AutoConfig.for_model(**values)
    except Exception as e:  # any exception: each model's config has its own checks, or none
        fix = "use a config that this version of transformers reads"
        raise ShardcError(f"transformers refuses the config: {e}", where=file, fix=fix) from None

    words = getattr(config.get_text_config(), "vocab_size", None)
    if words is None or not (cls or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        fault = f"a model of type {values['model_type']!r} is not a causal language model, which is what hf: makes"
        if cls:
            fault = f"a {cls} does not accept token ids, but the batch of an hf: model has only token ids"
        fix = "write a model.py: model() returns the transformers model, batch() its inputs and labels"
        raise ShardcError(fault, where=file, fix=fix)

    def build() -> nn.Module:
        try:
            if cls:
                return getattr(transformers, cls)(config)  # type: ignore[no-any-return]
            auto = transformers.AutoModelForCausalLM
            return auto.from_config(config, trust_remote_code=False)  # type: ignore[no-any-return, no-untyped-call]
        except Exception as e:  # any exception: the sizes reach all of the model's code
            fault = f"transformers cannot make the model: {type(e).__name__}: {e}"
            raise ShardcError(fault, where=file, fix="correct the sizes in the config; --debug shows more") from e

    ids = torch.randint(0, words, (batch, seq), generator=torch.Generator().manual_seed(0))
    full = f"hf:{cls + ':' if cls else ''}{(folder or path).absolute()}"
    weights = folder if folder is not None and has_weights(folder) else None
    if folder is not None and weights is None and unread(folder):
        raise no_weights(folder, f"hf:{folder / 'config.json'} begins with random weights")
    note = "weights: random, because there is only a config"
    if folder is None and has_weights(path.parent):
        note = f"weights: random; those beside the config are not read (hf:{path.parent} reads them)"
    return ModelFile(full, build, {"input_ids": ids, "labels": ids.clone()}, weights=weights, note=note)


def takes_positions(file: ModelFile) -> bool:
    """Return whether a model takes position_ids."""
    return "position_ids" in inspect.signature(file.on_meta().forward).parameters


def _with_data(file: ModelFile, data: str, batch: int, seq: int | None, seed: int) -> ModelFile:
    """Return a model of transformers with the data of --data. Its example batch then has the form of these data."""
    if Path(data).suffix != ".py":
        chats_of, config = needed("text", "rows", "chats_of"), source_of(file.ref)
        return replace(file, **chats_of(config, data, batch, seq, positions=takes_positions(file)))
    if seq is not None:
        raise ShardcError("the rows of a Python file have their own length", where="--seq", fix="leave it out")
    path = _existing(data, data, "file", "a Python file with data(split)")
    module = _import(path)
    optional, make_batch = _optional(module, path), _function(module, path, "batch")
    if optional["data"] is None:
        fix = "define data(split), which returns a dataset for 'train', and one or None for 'valid'"
        raise ShardcError("the file has no data()", where=data, fix=fix)
    with _users(path, "batch()" if make_batch else "data('train')"):
        seed_everything(seed)
        return replace(file, batch=make_batch() if make_batch else _example(optional, batch), **optional)


def _example(optional: Mapping[str, Any], batch: int) -> Any:
    """Return a global batch of the first samples of data('train')."""
    source, collate = optional["data"]("train"), optional["collate"] or default_collate
    if isinstance(source, DataLoader):
        return next(iter(source))
    samples = list(islice(source, batch) if not is_map_style(source) else map(source.__getitem__, range(batch)))
    try:
        return collate(samples)
    except (TypeError, RuntimeError, KeyError) as e:
        fix = "define collate(samples), which makes a batch of them, or batch(), which returns an example batch"
        raise ShardcError(f"the samples of data('train') make no batch: {e}", where="data", fix=fix) from e
