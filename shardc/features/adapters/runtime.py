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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.features.adapters.program import MAGNITUDE, A, Adapter, B, adapted_weights, adapter_fqn, adapters
from shardc.ir.patterns import enclosing
from shardc.ir.program import Program
from shardc.ir.stored import whole_name
from shardc.layer_names import of_every_layer
from shardc.runtime.state.boxes import Numbers, Sliced, index
from shardc.runtime.state.init import Recipe, record
from shardc.runtime.state.init_tape import Recorder
from shardc.runtime.state.pretrained import ADAPTER, folded
from shardc.runtime.state.sources import Weights, from_files, weights_for
from shardc.runtime.state.weight_files import WeightFiles, open_weights

CONFIG, PREFIX = "adapter_config.json", "base_model.model."
#: Settings of peft by which an adapter is more than B A x, and initial values that change the model's own weights.
_NOT_READ = ("layer_replication", "alora_invocation_tokens", "use_qalora", "trainable_token_indices")
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "merge them with peft (merge_and_unload), and begin from that model"
_OF_MODEL = "compile the model beside which they were trained"
_KEEP = "keep a checkpoint (engine.save), or leave it out of `adapters`"
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
        for name, kind in zip(adapter.names, (A, B, MAGNITUDE), strict=False):
            p = program.params_by_name[name]
            for of in adapted_weights(program, adapter):
                part = AdapterTensor(adapter, of, kind, p.shape[1:] if p.members else p.shape)
                result[part.name] = part
    return result


def weights_of(program: Program, model: Any, files: Any, seed: int) -> Weights:
    """Return the weights for a program, with those of its adapters from files, or initial ones.

    files: as of `weights_for`, or a pair of the model's weights and the adapters', either of which may be None. A
    folder that peft saved has only adapters: then the model's weights are `model`'s.
    """
    expected = parts(program)
    base, adapter_files = files if isinstance(files, tuple) else (files, None)
    tensors: dict[str, Tensor] = {}
    recorder, notes = Recorder(), list[str]()
    rest: list[WeightFiles] = []
    for source in (open_weights(x) for x in (base, adapter_files) if x is not None):
        names = _spelled(source.tensors, expected, program)
        _check(source, names, expected, program)
        if names:
            notes.append(f"adapters: {len(names)} tensors of {source.path} ({source.what})")
            tensors |= {n: _of_peft(recorder, source.tensors[key], expected[n]) for n, key in names.items()}
        left = {n: x for n, x in source.tensors.items() if n not in names.values()}
        if left:
            rest.append(replace(source, tensors=left))
    weights = weights_for(model, rest[0] if rest else None, seed)
    for more in rest[1:]:  # modules that were trained with the adapters: all other weights stay
        weights = replace(from_files(more, weights, seed), notes=weights.notes)
        notes.append(f"{len(more.tensors)} more tensors of {more.path}")
    frozen = (p.fqn for p in program.params if p.fqn in weights.tensors and not p.requires_grad)
    drawn = {n: weights.tensors[n].drawn() for n in frozen}
    if (lost := [n for n, random in drawn.items() if random]) and len(lost) < len(drawn):
        fix = f"train them, such as freeze: ['*', '!{lost[0].rpartition('.')[0]}']"
        notes.append(f"drawn and frozen: {folded(lost)}. Neither files nor saved adapters have these numbers: {fix}")
    begun = {n: p for n, p in expected.items() if n not in tensors and n not in weights.tensors}
    if begun and not tensors:
        notes.append("adapters: with their initial values")
    read = Recipe(recorder.tape, {n: recorder.ref(x) for n, x in tensors.items()}).tensors(seed)
    added = {**_initial(program, weights.tensors, begun, seed + _STREAM), **read}
    # a model in memory has no notes: its adapters' initial values are not noted either
    more_notes = notes if weights.notes or tensors else []
    return replace(weights, tensors={**weights.tensors, **added}, notes=(*weights.notes, *more_notes))


def _initial(
    program: Program, given: Mapping[str, Sliced], begun: Mapping[str, AdapterTensor], seed: int
) -> dict[str, Sliced]:
    """Return the initial values of these tensors, each drawn separately. given: the model's weights."""
    # in the order of names, which is the same whether experts are in one tensor or separate
    drawn = [part for _, part in sorted(begun.items()) if part.kind != MAGNITUDE]

    def build() -> nn.Module:
        module = nn.Module()
        for i, p in enumerate(drawn):
            x = torch.empty(p.shape)
            x = x.uniform_(-1 / math.sqrt(p.shape[-1]), 1 / math.sqrt(p.shape[-1])) if p.kind == A else x.zero_()
            module.register_parameter(f"p{i}", nn.Parameter(x))
        return module

    def lengths(w: Sliced, dim: int, *box: Numbers) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(w.tensor().detach(), dim=dim)
        return norms[index(*box)]

    first = record(build)[1].tensors(seed)
    result = {part.name: first[f"p{i}"] for i, part in enumerate(drawn)}
    for part in (p for p in begun.values() if p.kind == MAGNITUDE):
        # a tied weight may be there under another name than its adapter's
        names = (part.base, *program.params_by_name[part.adapter.base].names)
        w = next(given[n] for n in names if n in given)
        read = functools.partial(lengths, w, -2 if part.adapter.flipped else -1)
        result[part.name] = Sliced(part.shape, w.dtype, read, True)
    return result


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


def _of_peft(recorder: Recorder, stored: Sliced, part: AdapterTensor) -> Tensor:
    """Return a tensor of a file on the recorder's tape, in our form."""
    x = recorder.stored(stored)
    if x.dim() == len(part.shape):
        return x
    experts, rows, columns = part.shape
    with recorder.recording():
        if part.kind == A:
            return x.reshape(experts, rows, columns)
        return x.reshape(rows, columns, experts).permute(2, 0, 1).contiguous()


def _spelled(tensors: Mapping[str, Any], wanted: Mapping[str, AdapterTensor], program: Program) -> dict[str, str]:
    """Return {name of an adapter's tensor: its name in the files}."""
    ours = {n: n for n in wanted if n in tensors}
    return ours or {n: key for n, part in wanted.items() if (key := peft_name(part, program)) in tensors}


def _check(
    files: WeightFiles, spelled: Mapping[str, str], wanted: Mapping[str, AdapterTensor], program: Program
) -> None:
    """Raise ShardcError, with what to write in the spec, if the adapters in files are not those of the spec."""
    errors, where, settings = Errors(), str(files.path), _settings(files.folder / CONFIG)
    known, modules = {*spelled.values()}, {m for p in program.params for n in p.names for m in enclosing(n)}
    others = {m[1].removeprefix(PREFIX): k for k in files.tensors if k not in known and (m := ADAPTER.fullmatch(k))}
    for module, key in others.items():
        _, rank, alpha = settings(module) if settings else ("", min(files.tensors[key].shape, default=1), None)
        entry = f"match: {of_every_layer(module)!r}, rank: {rank}" + (f", alpha: {alpha}" if alpha else "")
        fix = f"add {{{entry}}} to `adapters`" if module in modules else _OF_MODEL
        if "lora_embedding" in key:
            fix = f"embeddings take no adapter: {_MERGE}"
        errors.add(f"the files have an adapter of {module}, and the spec has none", where=where, fix=fix)
    for name, part in wanted.items():
        a, module = part.adapter, part.base.removesuffix(".weight")
        if (stored := spelled.get(name)) is None:
            if adapter_fqn(part.base, A) in spelled:
                fix = "write the `kind` with which they were trained"
                errors.add(f"{name} is not in the files", where=where, fix=fix)
            elif part.kind == A and (spelled or others):
                fault = f"the spec has an adapter of {module}, and the files have none"
                errors.add(fault, where=where, fix="leave it out of `match`")
            continue
        kind, rank, alpha = settings(module) if settings else (a.kind, 0, _number(a.alpha))
        shape = files.tensors[stored].shape
        if math.prod(shape) != math.prod(part.shape):
            rank = rank or min(shape, default=0)
            fix = f"write rank: {rank}" if rank != a.rank else _OF_MODEL
            if 0 in shape:
                fix = "save them again, with all ranks' parts gathered (DeepSpeed ZeRO 3 and FSDP leave them out)"
            fault = f"{stored} has the shape {list(shape)}, and {list(part.shape)} in the program"
            errors.add(fault, where=where, fix=fix)
        if part.kind == A and (kind, alpha) != (a.kind, a.alpha):
            fault = f"the adapter of {module} is {kind} of alpha {alpha}, and {a.kind} of alpha {_number(a.alpha)}"
            errors.add(f"{fault} in the spec", where=where, fix=f"write kind: {kind}, alpha: {alpha}")
    errors.raise_any()


def _settings(file: Path) -> Callable[[str], tuple[str, int, float]] | None:
    """Return what adapter_config.json says of a module, (kind, rank, alpha); None if there is no such file.

    Raises ShardcError for adapters that do more than B A x.
    """
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
        kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
        begun = str(config.get("init_lora_weights")).lower()

        def of(module: str) -> tuple[str, int, float]:
            def setting(name: str, patterns: str) -> Any:
                table = dict(config.get(patterns) or {})
                return next((x for key, x in table.items() if re.match(rf"(.*\.)?({key})$", module)), config[name])

            return kind, int(setting("r", "rank_pattern")), _number(float(setting("lora_alpha", "alpha_pattern")))

        of("")
        others = [name for name in _NOT_READ if config.get(name)]
        others += [f"init_lora_weights: {begun}"] if begun.startswith(_CHANGES_WEIGHTS) else []
        others += [config["peft_type"]] if config["peft_type"] != "LORA" else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as e:
        fix = "name a folder that peft's save_pretrained wrote"
        raise ShardcError(f"the configuration of the adapters cannot be read: {e}", where=str(file), fix=fix) from None
    if others:
        fault = f"shardc reads LoRA, rsLoRA and DoRA of peft, and not {', '.join(others)}"
        raise ShardcError(fault, where=str(file), fix=_MERGE)
    return of


# --- an export: a folder that peft loads, or the model with the adapters merged


def exported(
    program: Program, tensors: Mapping[str, Tensor], *, merge: bool
) -> tuple[dict[str, Tensor], Callable[[Path, Path | None], None]]:
    """Return the tensors to write, and the function that writes their configuration (folder, folder of the weights).

    tensors: of the program, under all names. merge: add the adapters to the adapted weights, instead of peft's form.
    """
    made = _merged(program, tensors) if merge else _peft_tensors(program, tensors)
    return made, functools.partial(_write_config, program)


def _peft_tensors(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of adapters, and of modules that are trained themselves, under peft's names.

    Raises ShardcError if peft has no form for them.
    """
    saved, own = tuple(_saved(program)), parts(program)
    merged = "export merged: engine.export(folder, merge=True)"

    def in_saved(name: str) -> bool:  # peft takes all modules whose names end so, with what is in them
        return any(module.endswith(saved) for module in enclosing(name)[:-1])

    kinds = {a.kind for a in adapters(program)}
    if len(kinds) > 1:
        fault = f"peft has one kind of adapter in a folder, and the spec has {' and '.join(sorted(kinds))}"
        raise ShardcError(fault, where="adapters", fix=merged)
    if "" in saved:
        fault = "peft saves whole modules beside adapters, but these trained weights belong to the model itself"
        raise ShardcError(fault, where="freeze", fix=f"freeze it, or {merged}")
    for a in adapters(program):
        name, *_ = adapted_weights(program, a)
        if not a.inside:
            fault = f"peft has no form for the adapter of {name}, by which another module multiplies"
            raise ShardcError(fault, where="adapters", fix=merged if a.whole else _KEEP)
        if in_saved(name):
            fault = f"peft has no adapter in a module that is trained itself, as that of {name} is"
            raise ShardcError(fault, where="freeze", fix=f"freeze it, or {merged if a.whole else _KEEP}")
    result = {peft_name(part, program): as_peft(tensors[n], part) for n, part in own.items()}
    return result | {PREFIX + n: x for n, x in tensors.items() if n not in own and in_saved(n)}


def _saved(program: Program) -> list[str]:
    """Return the outermost modules with trained parameters of the model itself, under all names."""
    beside = {n for a in adapters(program) for n in a.names}
    trained = [n for p in program.params if p.requires_grad and p.name not in beside for n in p.names]
    modules = dict.fromkeys(n.rpartition(".")[0] for n in trained)
    return [m for m in modules if modules.keys().isdisjoint(enclosing(m)[:-1])]


def _merged(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors, with adapters added.

    Raises ShardcError for a weight that is also used without its adapter.
    """
    result = {n: x for n, x in tensors.items() if n not in parts(program)}
    for adapter in adapters(program):
        base, names = program.params_by_name[adapter.base], adapted_weights(program, adapter)
        if whole_name(base.fqn) != base.fqn:
            fault = f"{whole_name(base.fqn)} is quantised: the added adapter would be rounded"
            raise ShardcError(fault, where="merge", fix="export the adapters (without merge)")
        if not adapter.whole:
            other = next((f"also {n}, which its adapter does not change" for n in base.names if n not in names), "")
            fault = f"{names[0]} is {other or 'also used without its adapter'}: they cannot be merged"
            fix = "export the adapters (without merge), or train with the two weights untied"
            raise ShardcError(fault, where="merge", fix=fix if adapter.inside else _KEEP)
        for own in names:
            a, b = (tensors[adapter_fqn(own, kind)] for kind in (A, B))
            m = tensors[adapter_fqn(own, MAGNITUDE)] if adapter.magnitude else None
            result |= dict.fromkeys((own,) if base.members else base.names, merged(tensors[own], a, b, m, adapter))
    return result


#: Ends of the names of transformers' classes -> peft's name of the task, by which its Auto classes choose.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def _task(base: Path | None) -> str | None:
    """Return peft's name of the task of a base model, by the class that its config.json names; None if unknown."""
    config = base / "config.json" if base is not None else None
    if config is None or not config.is_file():
        return None
    named = (json.loads(config.read_text()).get("architectures") or [""])[0]
    return next((task for end, task in _TASKS.items() if named.endswith(end)), None)


def _write_config(program: Program, folder: Path, base: Path | None) -> None:
    """Write adapter_config.json. base: the folder that the model's weights came from."""
    named = {a: adapted_weights(program, a) for a in adapters(program)}
    # peft's patterns name modules: single parameters get the settings for all
    unnamed = [a for a, names in named.items() if not names[0].endswith(".weight")] or named
    rank = Counter(a.rank for a in unnamed).most_common(1)[0][0]
    alpha = Counter(a.alpha for a in unnamed).most_common(1)[0][0]
    layers = [n for names in named.values() for n in names]
    # `^`: this module alone, and no other whose name ends so
    keys = {f"^{n.removesuffix('.weight')}": a for a, names in named.items() for n in names}
    targets = [n.removesuffix(".weight") for n in layers if n.endswith(".weight")]
    modules, ends = {n.rpartition(".")[0] for p in program.params for n in p.names}, tuple(f".{t}" for t in targets)
    kind = next(iter(named)).kind
    flipped = (a for a in named if a.flipped and len(program.params_by_name[a.base].shape) == 2)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": _task(base),
        "base_model_name_or_path": str(base) if base is not None else None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": max(a.dropout for a in named),
        "bias": "none",
        "fan_in_fan_out": any(flipped),
        "init_lora_weights": True,
        "use_rslora": kind == "rslora",
        "use_dora": kind == "dora",
        "target_modules": targets,
        "exclude_modules": [m for m in sorted(modules) if m not in targets and m.endswith(ends)] or None,
        "target_parameters": [n for n in layers if not n.endswith(".weight")] or None,
        "rank_pattern": {n: a.rank for n, a in keys.items() if a.rank != rank},
        "alpha_pattern": {n: _number(a.alpha) for n, a in keys.items() if a.alpha != alpha},
        "modules_to_save": _saved(program) or None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def merged(w: Tensor, a: Tensor, b: Tensor, m: Tensor | None, adapter: Adapter) -> Tensor:
    """Return W + scale B A; for dora with rows of length m. Computes products in float32 at least."""
    wide = torch.promote_types(w.dtype, torch.float32)
    factors = [x.to(wide) for x in (a, b)]
    ordered = [x.transpose(-2, -1) for x in factors] if adapter.flipped else factors[::-1]
    summed = w.to(wide) + torch.matmul(*ordered) * adapter.scale
    if m is not None:
        dim = 0 if adapter.flipped else 1
        gain = m.to(wide) / summed.norm(dim=dim)
        summed = summed * (gain if adapter.flipped else gain.unsqueeze(1))
    return summed.to(w.dtype)


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x
