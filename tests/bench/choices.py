"""Fixed choices on every mesh: gradients of MoE families against one device, and how far bfloat16 steps differ.

python -m tests.bench.choices          # the sweep in float64, and the table in bfloat16; writes docs/measured/choices.md
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.verify.simulate import Simulation
from tests import equality, stand_in_compiler, zoo
from tests.features.choices import models

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "choices.md"
ROWS, TOKENS = 8, 16
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",  # the default has no float64
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_DOTS = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "head_dim": 8,
}
_LLAMA4 = {"num_local_experts": 8, "head_dim": 8, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}
_ERNIE = {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1}
#: Class of transformers, fields of its config, and the modules that choose.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8}, "*.mlp.gate"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {"num_experts": 8, "shared_expert_intermediate_size": 32}, "*.mlp.gate"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 8, "head_dim": 8}, "*.mlp.gate"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT, "*.mlp"),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8}, "*.mlp.gate"),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 8, "head_dim": 8}, "*.mlp.router"),
    "granitemoe": ("GraniteMoeForCausalLM", {"num_local_experts": 8}, "*.router"),
    "llama4": ("Llama4ForCausalLM", {**_LLAMA4, "attention_chunk_size": 8, "interleave_moe_layer_step": 1}, "*.router"),
    "dots1": ("Dots1ForCausalLM", _DOTS, "*.mlp"),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", _ERNIE, "*.mlp.gate"),
}
_PP = {"mesh": {"pp": 2}, "batch": {"microbatches": 4}}
SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
    "tp+sp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}, "activations": {"LAYERS": {1: "tp"}}},
    "cp": {"mesh": {"cp": 2}, "sequence": {"axis": "cp"}},
    "ep": {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "EXPERTS", "axis": "ep"}]},
    "gpipe": {**_PP, "pipeline": {"axis": "pp", "schedule": "gpipe"}},
    "1f1b": {**_PP, "pipeline": {"axis": "pp", "schedule": "1f1b"}},
    "zb-h1": {**_PP, "pipeline": {"axis": "pp", "schedule": "zb-h1"}},
    "interleaved": {**_PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "1f1b"}},
    "zb-v": {**_PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"}},
    "dualpipe-v": {**_PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "dualpipe-v"}},
    "recomputed": {"mesh": {"dp": 2}, "checkpoint": [{"match": "LAYERS", "save": []}]},
    "compiled": {"mesh": {"dp": 2}, "execution": {"compile": "layers"}},
}
#: Those on which steps in bfloat16 are compared with one device.
ROUNDED = ("dp", "tp+sp", "cp", "ep", "1f1b")


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Tensor], Any, str]:
    """Return a model, its batch, its loss function (None: its own), and the modules that choose."""
    if name == "sparse attention":
        model, _ = models.built(models.Sparse)
        ids = torch.randint(models.VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
        return model.to(dtype), {"ids": ids, "labels": ids.roll(-1, 1)}, models.loss, "layers.*"
    import transformers

    kind, fields, pattern = FAMILIES[name]
    of: Any = getattr(transformers, kind)
    config = of.config_class(**(COMMON | fields))
    torch.manual_seed(0)
    model = of(config).to(dtype).train()
    ids = torch.randint(3, COMMON["vocab_size"], (ROWS, TOKENS))
    return model, {"input_ids": ids, "labels": ids.clone()}, None, pattern


def fitted(spec: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a spec with the names of a model's modules."""
    named = [n for n, _ in model.named_modules()]
    layers = "layers.*" if "layers.0" in named else "model.layers.*"
    experts = "*.experts" if any(n.endswith(".experts") for n in named) else "*.block_sparse_moe"

    def put(x: Any) -> Any:
        if isinstance(x, dict):
            return {put(k): put(v) for k, v in x.items()}
        return [put(v) for v in x] if isinstance(x, list) else {"LAYERS": layers, "EXPERTS": experts}.get(x, x)

    result: dict[str, Any] = put(spec)
    return result


class Runs:
    """One model on many specs: captured once, with steps on one device."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.batch, self.loss, self.pattern = build(name, dtype)
        proves = dtype == torch.float64  # in bfloat16 eager and captured code choose differently
        self.captured = capture(self.model, self.batch, loss=self.loss, prove=proves)
        self.one = self.step({"mesh": {"dp": 1}}, "record")
        self.choices = self.one.outputs

    def program(self, spec: dict[str, Any], mode: str = "") -> Any:
        choices = {"choices": {self.pattern: mode}} if mode else {}
        full = {"shardc": 1, **fitted(spec, self.model), **choices}
        return shardc.compile(self.model, self.batch, full, loss=self.loss, captured=self.captured, prove=False)

    def step(self, spec: dict[str, Any], mode: str = "", choices: dict[str, Tensor] | None = None) -> Simulation:
        batch = {**self.batch, "choices": choices} if choices else self.batch
        return shardc.simulate(self.program(spec, mode), self.model, batch)

    def others(self) -> dict[str, Tensor]:
        """Return choices that the model does not make: those of other tokens."""
        return {n: x.roll((1, 3), (0, 1)) for n, x in self.choices.items()}


def exact(name: str) -> dict[str, float]:
    """Return the largest difference of loss and gradients from one device with the same choices, for each spec."""
    with zoo.Wide():
        runs, off = Runs(name), {}
        given = runs.choices if name == "sparse attention" else runs.others()
        one = runs.step({"mesh": {"dp": 1}}, "replay", given)
        again = runs.step({"mesh": {"dp": 1}}, "replay", runs.choices)
        equal = torch.equal(again.loss, runs.one.loss) and all(
            torch.equal(again.grads[n], g) for n, g in runs.one.grads.items()
        )
        off["record, then replay"] = 0.0 if equal else float("nan")
        for label, spec in SPECS.items():
            if name == "sparse attention" and label == "ep":
                continue
            try:
                program = runs.program(spec, "replay")
                if not program.prove().ok:
                    raise shardc.ShardcError(f"not proven: {program.prove().gaps[0]}")
                with pytest.MonkeyPatch.context() as patch:
                    if label == "compiled":
                        stand_in_compiler.put_in(patch)
                    sim = shardc.simulate(program, runs.model, {**runs.batch, "choices": given})
                of_loss, of_grads = equality.differences(sim, one.loss, one.grads)
                off[label] = max(of_loss, *of_grads.values())
            except shardc.ShardcError as e:
                print(name, label, e, flush=True)
                off[label] = float("inf")
    return off


def rounded(name: str) -> dict[str, tuple[float, float, float, float, float]]:
    """Return for each spec, of a step in bfloat16: differences of loss and gradients, free and fixed; other choices."""
    runs, off = Runs(name, torch.bfloat16), {}
    for label in ROUNDED:
        if name == "sparse attention" and label == "ep":
            continue
        free = runs.step(SPECS[label], "record")
        fixed = runs.step(SPECS[label], "replay", runs.choices)
        differ = [
            (free.outputs[n].sort(-1).values != x.sort(-1).values).any(-1).double().mean()
            for n, x in runs.choices.items()
        ]
        row = [float(torch.stack(differ).mean())]
        for sim in (free, fixed):
            one = runs.one
            grads = {n: g.double() for n, g in one.grads.items()}
            floor = 1e-2 * float(torch.stack([g.norm() for g in grads.values()]).norm())
            of_grads = max(
                float((sim.grads[n].double() - g).norm()) / max(float(g.norm()), floor) for n, g in grads.items()
            )
            row += [abs(float(sim.loss.double() - one.loss.double())) / abs(float(one.loss)), of_grads]
        off[label] = tuple(row)
    return off  # type: ignore[return-value]


def page(off: dict[str, dict[str, float]], rows: dict[str, dict[str, tuple[float, ...]]]) -> str:
    """Return the page of both tables."""
    specs = list(dict.fromkeys(label for of in off.values() for label in of))
    lines = [
        "# Fixed choices, measured",
        "",
        f"Made by `python -m tests.bench.choices` on {time.strftime('%Y-%m-%d')}, on a CPU. Tiny models with random weights (two layers, width 32,",
        f"8 experts, 2 for each token; the sparse attention takes 3 keys), {ROWS} rows of {TOKENS} tokens.",
        "",
        "## Equal on any mesh",
        "",
        "Float64. The largest relative difference of the loss and of any gradient from one device with the same given choices. These are not the model's",
        "own: each token has those of another one (the sparse attention: its own). The first column is 0 if a step that replays its own record is equal bit by",
        "bit. Each program is proven too. *compiled*: fused regions run with a compiler that changes no number.",
        "",
        "| family | " + " | ".join(specs) + " |",
        "|---|" + "---:|" * len(specs),
    ]
    for name, of in off.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{of[x]:.0e}" if of.get(x) else "0" if x in of else "" for x in specs) + " |"
        )
    lines += [
        "",
        "## How far steps in bfloat16 differ",
        "",
        "Model and batch in bfloat16, against one device in bfloat16. *other*: tokens (mean over layers) that choose other experts or keys than on one device.",
        "*loss*, *gradient*: the relative difference of the loss, and the largest of any gradient, if each program chooses itself (free), and if all take",
        "the choices of one device (fixed). Where no token chooses otherwise, both are the same step.",
        "",
        "| family | mesh | other | loss, free | loss, fixed | gradient, free | gradient, fixed |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, of_spec in rows.items():
        for label, (other, *(a, b, c, d)) in of_spec.items():
            lines.append(f"| {name} | {label} | {100 * other:.1f} % | {a:.0e} | {c:.0e} | {b:.1e} | {d:.1e} |")
    free = [r for of_spec in rows.values() for r in of_spec.values() if r[0]]
    if free:
        low, high = (f(r[2] / r[4] for r in free) for f in (min, max))
        lines += [
            "",
            f"In {len(free)} of {sum(map(len, rows.values()))} cases some token chooses otherwise. Gradients then differ by up to {max(r[2] for r in free):.0e},"
            f" and with fixed choices by at most {max(r[4] for r in free):.0e}: {low:.0f} to {high:.0f} times less.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    off, rows = {}, {}
    for name in [*FAMILIES, "sparse attention"]:
        off[name], rows[name] = exact(name), rounded(name)
        print(name, off[name], rows[name], flush=True)
    PAGE.write_text(page(off, rows))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
