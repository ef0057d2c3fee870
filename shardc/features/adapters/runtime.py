"""Make weights of the spec's adapters: initial ones, or from files of peft or shardc.

    A     uniform in 1 / sqrt(in), as torch's linear layers and peft begin it         B     zeros
    m     the lengths of the weight's rows (out-features), so that a model with adapters begins as the one without

Names in files are ours, or peft's: with `base_model.model.` before them, and experts in one tensor as in its
ParamWrapper, [experts * rank, in] and [out, rank * experts].
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.features.adapters.program import MAGNITUDE, A, Adapter, B, adapter_fqn, adapters
from shardc.ir.program import Program
from shardc.ir.stored import whole_name
from shardc.runtime.state.boxes import Numbers, Sliced, index
from shardc.runtime.state.init import Recipe, record
from shardc.runtime.state.init_tape import Recorder
from shardc.runtime.state.sources import Weights, from_files, weights_for
from shardc.runtime.state.weight_files import WeightFiles, open_weights

CONFIG, PREFIX = "adapter_config.json", "base_model.model."
#: Added to the seed, so that adapters draw other numbers than the model's weights.
_STREAM = 1 << 32


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter: of a parameter, or of a member of a stack. base: the adapted weight."""

    adapter: Adapter
    base: str
    kind: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return adapter_fqn(self.base, self.kind)


def parts(program: Program) -> dict[str, AdapterTensor]:
    """Return the tensors of a program's adapters, by name."""
    result: dict[str, AdapterTensor] = {}
    for adapter in adapters(program):
        base = program.params_by_name[adapter.base]
        for name, kind in zip(adapter.names, (A, B, MAGNITUDE), strict=False):
            p = program.params_by_name[name]
            shape = p.shape[1:] if p.members else p.shape
            for of in base.members or (base.fqn,):
                part = AdapterTensor(adapter, whole_name(of), kind, shape)
                result[part.name] = part
    return result


def weights_of(program: Program, model: Any, files: Any, seed: int) -> Weights:
    """Return the weights for a program, with those of its adapters from files, or initial ones.

    files: as of `weights_for`, or a pair of the model's weights and the adapters', either of which may be None. A
    folder that peft saved has only adapters: then the model's weights are `model`'s.
    """
    expected = parts(program)
    base, adapter_files = files if isinstance(files, tuple) else (files, None)
    opened = [open_weights(x) for x in (base, adapter_files) if x is not None]
    tensors: dict[str, Tensor] = {}
    recorder, notes = Recorder(), list[str]()
    rest: list[WeightFiles] = []
    for source in opened:
        names = _spelled(source.tensors, expected, program)
        _check_config(source, program)
        if names:
            notes.append(f"adapters: {len(names)} tensors of {source.path} ({source.what})")
            tensors |= _read(source, names, expected, recorder)
        left = {n: x for n, x in source.tensors.items() if n not in names.values()}
        if left:
            rest.append(replace(source, tensors=left))
    weights = weights_for(model, rest[0] if rest else None, seed)
    for more in rest[1:]:  # modules that were trained with the adapters: all other weights stay
        weights = replace(from_files(more, weights, seed), notes=weights.notes)
        notes.append(f"{len(more.tensors)} more tensors of {more.path}")
    if len(tensors) not in (0, len(expected)):
        lost = sorted(set(expected) - set(tensors))
        fault = f"{len(lost)} of the {len(expected)} tensors of adapters are not in the files, such as {lost[0]}"
        raise ShardcError(
            fault, where=str(opened[-1].path), fix="write the `adapters` section with which they were trained"
        )
    begun = {n: p for n, p in expected.items() if n not in tensors and n not in weights.tensors}
    if begun and not tensors:
        notes.append("adapters: with their initial values")
    return _add_weights(weights, begun, tensors, recorder, seed, program, notes)


def _add_weights(
    given: Weights,
    begun: Mapping[str, AdapterTensor],
    found: Mapping[str, Tensor],
    recorder: Recorder,
    seed: int,
    program: Program,
    notes: Sequence[str],
) -> Weights:
    """Add weights of adapters. begun: with initial values; found: on the recorder's tape."""
    # in the order of names, which is the same whether experts are in one tensor or separate
    drawn = [begun[n] for n in sorted(begun) if begun[n].kind != MAGNITUDE]
    first, keys = _begin(drawn, seed + _STREAM)
    dims = {p.name: p for p in begun.values() if p.kind == MAGNITUDE}
    read = Recipe(recorder.tape, {n: recorder.ref(x) for n, x in found.items()})

    def lengths(part: AdapterTensor, *box: Numbers) -> Tensor:
        w = given.tensors[part.base].tensor().detach()
        norms: Tensor = torch.linalg.vector_norm(w, dim=-2 if part.adapter.flipped else -1)
        return norms[index(*box)]

    tensors = {name: first[key] for name, key in keys.items()}
    for name, part in dims.items():
        tensors[name] = Sliced(part.shape, given.tensors[part.base].dtype, functools.partial(lengths, part), True)
    tensors |= read.tensors(seed)
    return replace(
        given,
        tensors={**given.tensors, **tensors},
        # a model in memory has no notes: its adapters' initial values are not noted either
        notes=(*given.notes, *notes) if given.notes or found else given.notes,
    )


def _begin(wanted: Sequence[AdapterTensor], seed: int) -> tuple[dict[str, Sliced], dict[str, str]]:
    """Return the initial A and B, each drawn separately, and {name: its name there}."""
    keys = {p.name: f"p{i}" for i, p in enumerate(wanted)}

    def build() -> nn.Module:
        module = nn.Module()
        for p in wanted:
            x = torch.empty(p.shape)
            x = x.uniform_(-1 / math.sqrt(p.shape[-1]), 1 / math.sqrt(p.shape[-1])) if p.kind == A else x.zero_()
            module.register_parameter(keys[p.name], nn.Parameter(x))
        return module

    return record(build)[1].tensors(seed), keys


# --- files ------------------------------------------------------------------------------------------------------------


def peft_name(part: AdapterTensor, program: Program) -> str:
    """Return the name of a tensor in peft's files.

    Weights that are not called `weight` are wrapped inside each other, the module's last one outermost.
    """
    module, _, name = part.base.rpartition(".")
    if name == "weight":
        return f"{PREFIX}{module}.{part.kind}"
    inner = [a.base for a in adapters(program)]
    order = [p.fqn for p in program.params if p.name in inner and p.fqn.rpartition(".")[0] == module]
    wrapped = [n for n in order if not n.endswith(".weight")]
    depth = len(wrapped) - 1 - wrapped.index(part.base)
    return f"{PREFIX}{module}{'.base_layer' * depth}.{part.kind}"


def as_peft(x: Tensor, part: AdapterTensor) -> Tensor:
    """Convert one of our tensors to peft's form."""
    if x.dim() < 3:
        return x
    return x.flatten(0, 1) if part.kind == A else x.permute(1, 2, 0).reshape(x.shape[1], -1)


def _of_peft(x: Tensor, part: AdapterTensor) -> Tensor:
    if len(part.shape) < 3:
        return x
    experts, rows, columns = part.shape
    if part.kind == A:
        return x.reshape(experts, rows, columns)
    return x.reshape(rows, columns, experts).permute(2, 0, 1).contiguous()


def _spelled(tensors: Mapping[str, Any], wanted: Mapping[str, AdapterTensor], program: Program) -> dict[str, str]:
    """Return {name of an adapter's tensor: its name in the files}."""
    names = {n: n for n in wanted if n in tensors}
    if names:
        return names
    return {n: key for n, part in wanted.items() if (key := peft_name(part, program)) in tensors}


def _read(
    files: WeightFiles, mine: Mapping[str, str], wanted: Mapping[str, AdapterTensor], recorder: Recorder
) -> dict[str, Tensor]:
    """Return the tensors on the recorder's tape. Raises ShardcError for those of another shape."""
    errors, tensors = Errors(), dict[str, Tensor]()
    for name, key in mine.items():
        x, part = recorder.stored(files.tensors[key]), wanted[name]
        if x.numel() != math.prod(part.shape):
            fault = f"{key} has the shape {list(x.shape)}, and {list(part.shape)} in the program"
            errors.add(fault, where=str(files.path), fix="write the `rank` with which they were trained")
            continue
        if key != name:
            with recorder.recording():
                x = _of_peft(x, part)
        tensors[name] = x
    errors.raise_any()
    return tensors


def _check_config(files: WeightFiles, program: Program) -> None:
    """Raise ShardcError if adapter_config.json has another scale or kind than the spec."""
    file = files.folder / CONFIG
    if not file.is_file():
        return
    try:
        config = json.loads(file.read_text())
        kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
        peft, alpha, alphas = config["peft_type"], float(config["lora_alpha"]), dict(config.get("alpha_pattern") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fix = "name a folder that peft's save_pretrained wrote"
        raise ShardcError(f"the configuration of the adapters cannot be read: {e}", where=str(file), fix=fix) from None
    errors = Errors()
    for adapter in adapters(program):
        p = program.params_by_name[adapter.base]
        module = whole_name(p.names[0]).removesuffix(".weight")
        other = next((x for key, x in alphas.items() if re.match(rf"(.*\.)?({key})$", module)), alpha)
        if (peft, kind, float(other)) != ("LORA", adapter.kind, adapter.alpha):
            fault = f"the adapter of {module} is {peft} {kind} of alpha {other}, and {adapter.kind} of alpha"
            fix = f"write kind: {kind}, alpha: {other}" if peft == "LORA" else "shardc reads LoRA, rsLoRA and DoRA"
            errors.add(f"{fault} {adapter.alpha} in the spec", where=str(file), fix=fix)
            break
    errors.raise_any()


# --- an export: a folder that peft loads, or the model with the adapters merged


def exported(
    program: Program, tensors: Mapping[str, Tensor], ties: Mapping[str, str], *, merge: bool
) -> tuple[dict[str, Tensor], Callable[[Path, Path | None], None]]:
    """Return the tensors to write, and the function that writes their configuration (folder, folder of the weights).

    tensors: of the program; ties: {other name: name}. merge: add the adapters to the adapted weights.
    """
    export = _Export(program)
    return export.merged(tensors, ties) if merge else export.peft_tensors(tensors), export.write_config


@dataclass(frozen=True)
class _Export:
    """The adapters of a program, for an export."""

    program: Program

    def peft_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of adapters, and of modules that are trained themselves, under peft's names.

        Raises ShardcError if peft has no form for them.
        """
        self._check()
        of_adapters = parts(self.program)
        result = {peft_name(part, self.program): as_peft(tensors[n], part) for n, part in of_adapters.items()}
        saved = tuple(f"{m}." for m in self._saved())
        return result | {PREFIX + n: x for n, x in tensors.items() if n.startswith(saved) and n not in of_adapters}

    def merged(self, tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the model's tensors, with adapters added. ties: {other name: name}.

        Raises ShardcError for a tied weight whose adapter belongs to one use only.
        """
        of_adapters = parts(self.program)
        result = {n: x for n, x in tensors.items() if n not in of_adapters}
        for adapter in adapters(self.program):
            base = self.program.params_by_name[adapter.base]
            if whole_name(base.fqn) != base.fqn:
                fault = f"{whole_name(base.fqn)} is quantised: the added adapter would be rounded"
                fix = "export the adapters (without merge)"
                raise ShardcError(fault, where="merge", fix=fix)
            if tied := [other for other, name in ties.items() if name in base.names]:
                fault = f"{base.fqn} is also {tied[0]}, which its adapter does not change: they cannot be merged"
                fix = "export the adapters (without merge), or train with the two weights untied"
                raise ShardcError(fault, where="merge", fix=fix)
            for name in base.members or (base.fqn,):
                a, b = (tensors[adapter_fqn(name, kind)] for kind in (A, B))
                m = tensors[adapter_fqn(name, MAGNITUDE)] if adapter.magnitude else None
                result[name] = merged(tensors[name], a, b, m, adapter)
        return result

    def write_config(self, folder: Path, base: Path | None) -> None:
        """Write adapter_config.json. base: the folder that the model's weights came from."""
        every = adapters(self.program)
        modules = {a: self.program.params_by_name[a.base] for a in every}
        # peft's patterns name modules: single parameters get the settings for all
        unnamed = [a for a, p in modules.items() if not whole_name(p.names[0]).endswith(".weight")] or every
        rank = Counter(a.rank for a in unnamed).most_common(1)[0][0]
        alpha = Counter(a.alpha for a in unnamed).most_common(1)[0][0]
        named = {a: [whole_name(n) for n in (p.members or (p.fqn,))] for a, p in modules.items()}
        layers = [n for names in named.values() for n in names]
        keys = {n.removesuffix(".weight"): a for a, names in named.items() for n in names}
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": str(base) if base is not None else None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": _number(alpha),
            "lora_dropout": max(a.dropout for a in every),
            "bias": "none",
            "fan_in_fan_out": any(a.flipped and len(p.shape) == 2 for a, p in modules.items()),
            "init_lora_weights": True,
            "use_rslora": every[0].kind == "rslora",
            "use_dora": every[0].kind == "dora",
            "target_modules": [n.removesuffix(".weight") for n in layers if n.endswith(".weight")],
            "target_parameters": [n for n in layers if not n.endswith(".weight")] or None,
            "rank_pattern": {n: a.rank for n, a in keys.items() if a.rank != rank},
            "alpha_pattern": {n: _number(a.alpha) for n, a in keys.items() if a.alpha != alpha},
            "modules_to_save": self._saved() or None,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def _saved(self) -> list[str]:
        """Return the modules with trained parameters of the model itself."""
        adapter_names = {n for a in adapters(self.program) for n in a.names}
        trained = [p for p in self.program.params if p.requires_grad and p.name not in adapter_names]
        return list(dict.fromkeys(n.rpartition(".")[0] for p in trained for n in p.names))

    def _check(self) -> None:
        kinds = {a.kind for a in adapters(self.program)}
        if len(kinds) > 1:
            fault = f"peft has one kind of adapter in a folder, and the spec has {' and '.join(sorted(kinds))}"
            raise ShardcError(fault, where="adapters", fix="export them merged: engine.export(folder, merge=True)")
        if "" in self._saved():
            fault = "peft saves whole modules beside adapters, but these trained weights belong to the model itself"
            raise ShardcError(
                fault, where="freeze", fix="freeze it, or export merged: engine.export(folder, merge=True)"
            )


def merged(w: Tensor, a: Tensor, b: Tensor, m: Tensor | None, adapter: Adapter) -> Tensor:
    """Return W + scale B A; for dora with rows of length m. Computes products in float32 at least."""
    wide = torch.promote_types(w.dtype, torch.float32)
    factors = [x.to(wide) for x in (a, b)]
    if adapter.flipped:
        product = torch.matmul(*(x.transpose(-2, -1) for x in factors))
    else:
        product = torch.matmul(*reversed(factors))
    summed = w.to(wide) + product * adapter.scale
    if m is not None:
        dim = 0 if adapter.flipped else 1
        gain = m.to(wide) / summed.norm(dim=dim)
        summed = summed * (gain if adapter.flipped else gain.unsqueeze(1))
    return summed.to(w.dtype)


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x
