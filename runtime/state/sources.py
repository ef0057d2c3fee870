"""Read weights from a model, a function that builds one, a state_dict, or files, in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.optional import registered
from shardc.runtime.state.boxes import Sliced, in_memory_by_name
from shardc.runtime.state.init import Recipe, named_tensors, record, record_reset
from shardc.runtime.state.init_tape import Recorder
from shardc.runtime.state.pretrained import hf_builder, place
from shardc.runtime.state.weight_files import WeightFiles, open_weights
from shardc.runtime.storage import disk_calls


@dataclass(frozen=True)
class Weights:
    """Weights of any source. what: "model", "state_dict", "engine" or "file ...", for messages.

    tensors: by name, global; tied ones are one object. model: the module whose names and shapes these are; its values
    are not used. notes: for the user. folder: the source folder, if any.
    """

    what: str
    tensors: Mapping[str, Sliced]
    model: nn.Module | None = None
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def of_model(self) -> bool:
        """Whether they are a model's, which has the buffers that are not persistent, too."""
        return self.what == "model"

    def tied(self, names: Sequence[str]) -> bool:
        """Return whether these names are of one tensor, or of equal ones."""
        first, *others = (self.tensors[n] for n in names)
        same = (x for x in others if x is not first)
        return all(x.dtype == first.dtype and torch.equal(x.tensor(), first.tensor()) for x in same)


def weights(source: Any, seed: int) -> Weights:
    """Return the weights in a source, with the same numbers on every mesh. seed: of those that are computed.

    source: one of
        nn.Module with weights           not changed
        a function that builds the model run without memory: each parameter is computed separately
        nn.Module on the meta device     each module's own reset_parameters, as FSDP does it
        {name: tensor}, or a path        a state_dict; files that shardc.runtime.state.weight_files reads
    """
    if isinstance(source, nn.Module):
        named = dict(named_tensors(source))
        unset = [n for n, x in named.items() if x.is_meta]
        made = record_reset(source).tensors(seed) if unset else {}
        return Weights("model", in_memory_by_name(named, computed=True) | {n: made[n] for n in unset}, source)
    if isinstance(source, (str, Path, WeightFiles, Mapping)):
        files = open_weights(source)
        return Weights("state_dict" if files.what == "in memory" else f"file {files.path.name}", files.tensors)
    if callable(source):
        model, recipe = record(source)
        return Weights("model", recipe.tensors(seed), model, recipe.notes, recipe.folder)
    fix = "pass a model, a function that builds it, a state_dict or the path of one"
    raise ShardcError(f"weights cannot come from a {type(source).__name__}", fix=fix)


def weights_for(model: Any, files: Any, seed: int) -> Weights:
    """Return the weights of a model (or its builder), replaced by those of files.

    files: a path or a state_dict; None: the model's weights. model None, or a path: only the files; a folder whose
    config.json names a class of the transformers library defines the model too.
    """
    if isinstance(model, (str, Path)) and files is None:
        model, files = None, model
    if model is None and files is not None and not isinstance(files, Mapping):
        model = hf_builder(files.path if isinstance(files, WeightFiles) else disk_calls.expanded(files))
    if model is None:
        return weights(files, seed)
    if files is None:
        return weights(model, seed)
    base = weights(model, seed)
    if base.model is None:
        fix = "pass the model, or the function that builds it, as `model`"
        raise ShardcError(f"`weights` are put into a model, and this is a {type(model).__name__}", fix=fix)
    return from_files(files, base, seed)


def weights_of(program: Program, model: Any, files: Any, seed: int) -> Weights:
    """Return the weights for a program: `weights_for`, unless an optional feature that added parameters has its own."""
    if isinstance(model, Weights):
        return model
    special = next(registered("runtime", "weights_of", program.features), None)
    result: Weights = weights_for(model, files, seed) if special is None else special(program, model, files, seed)
    return result


def from_files(path: Any, base: Weights, seed: int) -> Weights:
    """Return the weights of files in a model; what they lack is as in `base`, which must have a model.

    Raises ShardcError for files of another model.
    """
    assert base.model is not None
    recorder, files = Recorder(), open_weights(path)
    placed, notes = place(files, base.model, recorder)
    read = Recipe(recorder.tape, {n: recorder.ref(x) for n, x in placed.items()})
    tensors = {**base.tensors, **read.tensors(seed)}
    return replace(base, tensors=tensors, notes=(*base.notes, *notes), folder=base.folder or files.folder)
