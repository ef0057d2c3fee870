"""Write docs/measured/gpu_steps.md: steps of eight models on one GPU against `program.cost`.

    gpu_steps.py measure steps.jsonl                     on a machine with a GPU: seconds, kernels, bytes; and every op's time
    gpu_steps.py table steps.jsonl --device cuda.yaml    anywhere: what is predicted for them, and the page

cuda.yaml: of `shardc device cuda --measure` there. Programs compile in processes of their own; steps run one model at a
time, behind a lock. `--device cpu --quick` of `measure` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.cost import device as known_device
from shardc.cost.measured.op_times import OpTimes
from shardc.runtime.mesh import TorchMesh

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "measured" / "gpu_steps.md"
STEPS, WARM = 7, 3
BFLOAT16: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
HEAD = """\
# Steps on one GPU, predicted and measured

Made by tests/bench/gpu_steps.py ({machine}). Models of transformers with random weights, of published widths and fewer layers; AdamW, one process, no
mesh. *step*: the median of {steps}; *host*: until its call returns; *kernels*: what the profiler counts on the device; *alone*: predicted of a host that takes no time; *peak*: of the allocator; of a model's first setting with
cuBLAS's workspaces, 64 MiB. While a model's steps ran the other models' programs compiled on the machine's other cores, which slows the host. (Rates of dropout and of rows that begin anywhere are from these steps, and part of the device files now.)

| model | setting | step, ms | predicted | off | host, ms | kernels, ms | alone | off | launches | peak, GiB | predicted | off |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True)
class Model:
    """build, batch: as users have them. layers: a pattern of what is recomputed."""

    build: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    layers: str


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def _text(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids.clone()}


def models(quick: bool) -> dict[str, Callable[[], Model]]:
    """quick: small ones, which try the harness."""
    import transformers as t

    def size(full: int, small: int) -> int:
        return small if quick else full

    def llama(hidden: int, inter: int, heads: int, layers: int, vocab: int, rows: int, length: int) -> Model:
        config = t.LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=inter,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=length,
            use_cache=False,
        )
        return Model(partial(t.LlamaForCausalLM, config), _text(_ids(vocab, rows, length)), "model.layers.*")

    def large_llama() -> Model:
        return llama(64, 128, 4, 2, 512, 2, 32) if quick else llama(4096, 11008, 32, 2, 32000, 2, 4096)

    def gpt2() -> Model:
        vocab, length = size(50257, 512), size(1024, 32)
        config = t.GPT2Config(
            vocab_size=vocab,
            n_embd=size(1600, 64),
            n_head=size(25, 4),
            n_layer=size(6, 2),
            n_positions=length,
            use_cache=False,
        )
        return Model(partial(t.GPT2LMHeadModel, config), _text(_ids(vocab, size(8, 2), length)), "transformer.h.*")

    def bert() -> Model:
        vocab, length, hidden = size(30522, 512), size(512, 32), size(1024, 64)
        config = t.BertConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            num_attention_heads=size(16, 4),
            num_hidden_layers=size(6, 2),
            intermediate_size=4 * hidden,
            max_position_embeddings=length,
        )
        batch = _text(_ids(vocab, size(32, 2), length))
        return Model(partial(t.BertForMaskedLM, config), batch, "bert.encoder.layer.*")

    def images(rows: int, side: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(rows, 3, side, side), "labels": _ids(1000, rows)}

    def vit() -> Model:
        hidden, side = size(1024, 64), size(224, 32)
        config = t.ViTConfig(
            hidden_size=hidden,
            num_attention_heads=size(16, 4),
            num_hidden_layers=size(6, 2),
            intermediate_size=4 * hidden,
            image_size=side,
            num_labels=1000,
            problem_type="single_label_classification",
        )
        return Model(partial(t.ViTForImageClassification, config), images(size(64, 2), side), "vit.layers.*")

    def resnet() -> Model:
        config = t.ResNetConfig(num_labels=1000, problem_type="single_label_classification")
        batch = images(size(64, 2), size(224, 32))
        return Model(partial(t.ResNetForImageClassification, config), batch, "resnet.encoder.stages.*")

    def mixtral() -> Model:
        vocab, length = size(32000, 512), size(2048, 32)
        config = t.MixtralConfig(
            vocab_size=vocab,
            hidden_size=size(1024, 64),
            intermediate_size=size(3584, 64),
            num_hidden_layers=2,
            num_attention_heads=size(16, 4),
            num_key_value_heads=size(4, 1),
            max_position_embeddings=length,
            num_local_experts=8,
            use_cache=False,
            sliding_window=None,
        )
        return Model(partial(t.MixtralForCausalLM, config), _text(_ids(vocab, size(4, 2), length)), "model.layers.*")

    def t5() -> Model:
        vocab, hidden = size(32128, 512), size(1024, 64)
        config = t.T5Config(
            vocab_size=vocab,
            d_model=hidden,
            d_kv=64,
            d_ff=4 * hidden,
            num_layers=3,
            num_heads=size(16, 4),
            use_cache=False,
            decoder_start_token_id=0,
        )
        batch = _text(_ids(vocab, size(16, 2), size(512, 32)))
        return Model(partial(t.T5ForConditionalGeneration, config), batch, "encoder.block.*")

    return {
        "llama 7b": large_llama,
        "llama small": lambda: llama(256, 512, 4, 4, 1024, 4, 128),
        "gpt2 xl": gpt2,
        "bert large": bert,
        "vit large": vit,
        "resnet 50": resnet,
        "mixtral": mixtral,
        "t5 large": t5,
    }


def settings(model: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "float32", {}
    yield "bfloat16", BFLOAT16
    yield "bfloat16, checkpoint", BFLOAT16 | {"checkpoint": [{"match": model.layers}]}
    yield "bfloat16, graph", BFLOAT16 | {"execution": {"graphs": True}}
    yield "bfloat16, compile", BFLOAT16 | {"execution": {"compile": "layers"}}
    yield "bfloat16, compile, graph", BFLOAT16 | {"execution": {"compile": "layers", "graphs": True}}
    yield "fp8-rowwise", {"precision": {"compute": "bfloat16", "products": "fp8-rowwise"}}


def measure(name: str, kind: str, out: Path, quick: bool) -> None:
    """All settings of a model, each as a line of `out`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here = models(quick)[name]()
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    with device:
        model = here.build().train()
    batch = {k: v.to(device) for k, v in here.batch.items()}
    for setting, spec in settings(here):
        if kind == "cpu" and "graph" in setting:
            continue
        line: dict[str, Any] = {"model": name, "setting": setting, "machine": _machine(kind)}
        try:
            program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}, **spec}, prove=False)
            line |= _measured(program, model, batch, device, out)
        except Exception:  # the others go on
            line["error"] = traceback.format_exc()[-2000:]
        with out.open("a") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            f.write(json.dumps(line) + "\n")
        print({k: v for k, v in line.items() if k not in ("ops", "each")}, flush=True)


def _machine(kind: str) -> str:
    return f"{torch.cuda.get_device_name() if kind == 'cuda' else 'a CPU'}, torch {torch.__version__}"


def _measured(program: Any, model: nn.Module, batch: Any, device: torch.device, out: Path) -> dict[str, Any]:
    gpu = device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if gpu else 0
    engine = program.engine(
        model,
        lambda ps: torch.optim.AdamW(ps, lr=1e-4),
        mesh=TorchMesh(program.mesh, device=device),
        check=False,
    )
    loss = float(engine.step(batch))  # compiles what is compiled
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(WARM):
            engine.step(batch)
        _settle(gpu)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        took: list[tuple[float, float]] = []
        for _ in range(STEPS):
            _settle(gpu)
            begin = time.perf_counter()
            engine.step(batch)
            returned = time.perf_counter()
            _settle(gpu)
            took.append((time.perf_counter() - begin, returned - begin))
        peak = torch.cuda.max_memory_allocated() - before if gpu else 0
        with OpTimes(device, engine.mesh) as times:
            engine.step(batch)
        ops = times.measured(0).to_json()
        kernels: list[tuple[float, int]] = []
        if gpu:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                engine.step(batch)
                _settle(gpu)
            kernels = [(e.self_device_time_total / 1e6, e.count) for e in profile.key_averages()]
    engine.close()
    seconds, host = map(statistics.median, zip(*took, strict=True))
    found = {"seconds": seconds, "host": host, "loss": loss, "peak": peak, "ops": ops}
    return found | {"gpu": sum(s for s, _ in kernels), "launches": sum(n for _, n in kernels)}


def _settle(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()


def table(lines: list[dict[str, Any]], device: Any, quick: bool) -> Iterator[str]:
    """The page's lines."""
    alone = device.model_copy(update={"host": 0.0})
    for name, make in models(quick).items():
        here = make()
        with torch.random.fork_rng():
            model = here.build().train()
        for setting, spec in settings(here):
            found = [x for x in lines if (x["model"], x["setting"]) == (name, setting)]
            if not found:
                continue
            x = found[-1]
            if "error" in x:
                yield f"| {name} | {setting} | {x['error'].strip().splitlines()[-1][:80]} " + "| " * 10 + "|"
                continue
            program = shardc.compile(model, here.batch, {"shardc": 1, "mesh": {"dp": 1}, **spec}, prove=False)
            cost, kernels = program.cost(device), program.cost(alone).step_seconds
            each = [
                *(f"{1e3 * x['seconds']:.1f}", f"{1e3 * cost.step_seconds:.1f}", _off(cost.step_seconds, x["seconds"])),
                *(f"{1e3 * x['host']:.1f}", f"{1e3 * x['gpu']:.1f}", f"{1e3 * kernels:.1f}", _off(kernels, x["gpu"])),
                *(str(x["launches"]), f"{x['peak'] / 2**30:.2f}", f"{cost.memory.peak / 2**30:.2f}"),
                _off(cost.memory.peak, x["peak"], 2),
            ]
            yield f"| {name} | {setting} | " + " | ".join(each) + " |"


def _off(predicted: float, measured: float, digits: int = 0) -> str:
    return f"{100 * (predicted / measured - 1):+.{digits}f} %" if measured else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda", help="measure: cuda or cpu; table: a device file")
    parser.add_argument("--only", nargs="+", default=[], help="names of models")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    names = options.only or list(models(options.quick))
    if options.what == "measure":
        work = partial(measure, kind=options.device, out=options.file, quick=options.quick)
        with ProcessPoolExecutor(len(names), mp_context=get_context("spawn")) as pool:
            list(pool.map(work, names))
        return 0
    lines = [json.loads(line) for line in options.file.read_text().splitlines()]
    text = HEAD.format(machine=lines[0].get("machine", ""), steps=STEPS)
    for row in table(lines, known_device(options.device), options.quick):
        text += row + "\n"
        print(row, flush=True)
    OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
