"""What is exported of a program with adapters: a folder that peft loads, or the model with them merged.

adapter_model.safetensors     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [rank, in], ...
adapter_config.json           rank, alpha, kind, and which modules: what peft's LoraConfig reads
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.adapters import MAGNITUDE, A, Adapter, B, name_beside, whole_name
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.runtime.state.adapters import CONFIG, PREFIX, as_peft, parts, peft_name


@dataclass(frozen=True)
class OfSpec:
    """The adapters of a program's spec, for an export. merge: into the weights that they are beside."""

    program: Program
    merge: bool

    def apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapters' tensors, and those of modules that are trained themselves, under peft's names. Raises
        ShardcError for what peft has no form for.
        """
        self._check()
        found = {peft_name(part, self.program): as_peft(tensors[n], part) for n, part in parts(self.program).items()}
        saved = tuple(f"{m}." for m in self._saved())
        own = parts(self.program)
        return found | {PREFIX + n: x for n, x in tensors.items() if n.startswith(saved) and n not in own}

    def merged(self, tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
        """The model's tensors, with adapters added. ties: {other name: name}. Raises ShardcError for a tied weight, of
        which an adapter is beside one use only.
        """
        made = {n: x for n, x in tensors.items() if n not in parts(self.program)}
        for adapter in self.program.adapters:
            base = self._of(adapter)
            if whole_name(base.fqn) != base.fqn:
                what = f"{whole_name(base.fqn)} is quantised: what is added to it would be rounded"
                fix = "export the adapters (without merge)"
                raise ShardcError(what, where="merge", fix=fix)
            if tied := [other for other, name in ties.items() if name in base.names]:
                what = f"{base.fqn} is also {tied[0]}, which its adapter does not change: they cannot be merged"
                fix = "export the adapters (without merge), or train with the two weights apart"
                raise ShardcError(what, where="merge", fix=fix)
            for name in base.members or (base.fqn,):
                a, b = (tensors[name_beside(name, kind)] for kind in (A, B))
                m = tensors[name_beside(name, MAGNITUDE)] if adapter.magnitude else None
                made[name] = merged(tensors[name], a, b, m, adapter)
        return made

    def write_config(self, folder: Path, base: Path | None) -> None:
        """adapter_config.json. base: the folder that the model's weights came from."""
        adapters = self.program.adapters
        modules = {a: self._of(a) for a in adapters}
        # peft's patterns are of modules: those of single parameters get what holds for all
        alike = [a for a, p in modules.items() if not whole_name(p.names[0]).endswith(".weight")] or adapters
        rank = Counter(a.rank for a in alike).most_common(1)[0][0]
        alpha = Counter(a.alpha for a in alike).most_common(1)[0][0]
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
            "lora_dropout": max(a.dropout for a in adapters),
            "bias": "none",
            "fan_in_fan_out": any(a.flipped and len(p.shape) == 2 for a, p in modules.items()),
            "init_lora_weights": True,
            "use_rslora": adapters[0].kind == "rslora",
            "use_dora": adapters[0].kind == "dora",
            "target_modules": [n.removesuffix(".weight") for n in layers if n.endswith(".weight")],
            "target_parameters": [n for n in layers if not n.endswith(".weight")] or None,
            "rank_pattern": {n: a.rank for n, a in keys.items() if a.rank != rank},
            "alpha_pattern": {n: _number(a.alpha) for n, a in keys.items() if a.alpha != alpha},
            "modules_to_save": self._saved() or None,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def _of(self, adapter: Adapter) -> Param:
        return next(p for p in self.program.params if p.name == adapter.base)

    def _saved(self) -> list[str]:
        """Modules with parameters of the model's own that are trained."""
        own = {n for a in self.program.adapters for n in a.names}
        trained = [p for p in self.program.params if p.requires_grad and p.name not in own]
        return list(dict.fromkeys(n.rpartition(".")[0] for p in trained for n in p.names))

    def _check(self) -> None:
        kinds = {a.kind for a in self.program.adapters}
        if len(kinds) > 1:
            what = f"peft has one kind of adapter in a folder, and the spec has {' and '.join(sorted(kinds))}"
            raise ShardcError(what, where="adapters", fix="export them merged: engine.export(folder, merge=True)")
        if "" in self._saved():
            what = "peft saves whole modules beside adapters, and what is trained here belongs to the model itself"
            raise ShardcError(
                what, where="freeze", fix="freeze it, or export merged: engine.export(folder, merge=True)"
            )


def merged(w: Tensor, a: Tensor, b: Tensor, m: Tensor | None, adapter: Adapter) -> Tensor:
    """W + scale B A; of dora its rows are as long as m says. The products are in float32 at least."""
    wide = torch.promote_types(w.dtype, torch.float32)
    factors = [x.to(wide) for x in (a, b)]
    if adapter.flipped:
        made = torch.matmul(*(x.transpose(-2, -1) for x in factors))
    else:
        made = torch.matmul(*reversed(factors))
    summed = w.to(wide) + made * adapter.scale
    if m is not None:
        dim = 0 if adapter.flipped else 1
        gain = m.to(wide) / summed.norm(dim=dim)
        summed = summed * (gain if adapter.flipped else gain.unsqueeze(1))
    return summed.to(w.dtype)


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x
