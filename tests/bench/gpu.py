"""Write docs/measured/gpu.md: a Llama on one GPU, as the plain model, under torch.compile, and as shardc's program: line
by line, compiled, and as one CUDA graph. `make gpu` runs it on a machine with a GPU.

`--device cpu`: tries the harness on the CPU, with a model whose figures say nothing; prints, and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardc
from shardc.cost import device as known_device
from shardc.cost.measured.measure import measure
from shardc.runtime.mesh import TorchMesh

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "measured" / "gpu.md"
ROUNDS, WARM = 9, 3
LORA = "LoRA"  # a table of its own
#: name: (spec, is the plain model's forward under autocast, does it recompute). What is asked most comes first, as the
#: time on a GPU that is lent may end.
SETTINGS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "bfloat16": ({"precision": {"compute": "bfloat16"}}, True, False),
    LORA: ({}, False, False),
    "small, bfloat16": ({"precision": {"compute": "bfloat16"}}, True, False),
    "float32": ({}, False, False),
    "bfloat16, recompute": (
        {"precision": {"compute": "bfloat16"}, "checkpoint": [{"match": "model.layers.*"}]},
        True,
        True,
    ),
}
HEAD = """\
# On one GPU

Made by `make gpu` (tests/bench/gpu.py) on {machine}, torch {torch}, Python {python}. One Llama ({size}),
AdamW, one process, no mesh: what shardc's program costs on a device beside the model as it is. Medians of {rounds} steps each, each contender's taken in turns with the plain model's; peak memory is the
allocator's, of each contender alone. *host*: until the call returns, which may be before the device is done. *TFLOP/s*: 6 × parameters + 12 × layers × hidden × sequence for each
token (PaLM, appendix B), over the step. *small*: {small}, whose ops take less time than the host needs to start them. *graph*: `execution: {{graphs: true}}`. *predicted*: `program.cost` with this machine as `shardc device --measure` finds it.

| setting | contender | step, ms | / plain | host, ms | TFLOP/s | peak, GiB | / plain | loss |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def plain(llama: Any, source: Any, device: torch.device, setting: str, *, compiled: bool) -> Step:
    _, cast, recompute = SETTINGS[setting]
    model = deepcopy(source).to(device)
    if recompute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions call it otherwise
            model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")  # as shardc chooses there
    forward = torch.compile(model) if compiled else model

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if cast else nullcontext():
            loss = forward(**{k: v.to(device, non_blocking=True) for k, v in batch.items()}).loss
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class Seen:
    """Of a contender: bytes at the peak, alone; the first loss; seconds of steps, and until their calls return; and of
    the plain model's steps, which were taken in turns with these.
    """

    peak: float
    loss: float
    steps: list[tuple[float, float]]
    plain: list[tuple[float, float]]


def looked_at(
    make: Callable[[], Step], beside: Callable[[], Step], batch: Any, device: torch.device, rounds: int
) -> Seen:
    """Two contenders are there at a time at most; nothing of them is left."""
    peak = float("nan")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = make()
    loss = float(step(batch))
    for _ in range(WARM - 1):
        step(batch)
    settle(device)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    plain = beside()
    for _ in range(WARM):
        plain(batch)
    took: tuple[list[tuple[float, float]], list[tuple[float, float]]] = [], []
    for i in range(rounds):
        for each, seen in list(zip((step, plain), took, strict=True))[:: 1 if i % 2 else -1]:
            settle(device)
            begin = time.perf_counter()
            each(batch)
            returned = time.perf_counter()
            settle(device)
            seen.append((time.perf_counter() - begin, returned - begin))
    del step, plain
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Seen(peak, loss, *took)


def _step(program: Any, source: Any, optimizer: Any, mesh: TorchMesh) -> Step:
    return program.engine(source, optimizer, mesh=mesh).step  # type: ignore[no-any-return]


def rows(
    llama: Any, source: Any, setting: str, device: torch.device, machine: Any, rounds: int, compiles: bool
) -> Iterator[str]:
    """The table's lines of a setting, as they are found. source: the model whose weights all begin with."""
    batch = llama.batch()
    spec = {"shardc": 1, "mesh": {"dp": 1}, **SETTINGS[setting][0]}
    ways: dict[str, Any] = {"shardc": {}, "shardc, graph": {"graphs": True}}
    if compiles:
        compiled = {"compile": "layers"}
        ways |= {"shardc, compiled": compiled, "shardc, compiled, graph": {**compiled, "graphs": True}}
    if device.type == "cpu":
        ways = {name: how for name, how in ways.items() if "graph" not in name}
    programs = {
        name: shardc.compile(source, batch, {**spec, "execution": how}, prove=False) for name, how in ways.items()
    }
    mesh = TorchMesh(programs["shardc"].mesh, device=device)
    beside = partial(plain, llama, source, device, setting, compiled=False)
    makes: dict[str, Callable[[], Step]] = {"plain": beside}
    if compiles:
        makes["torch.compile"] = partial(plain, llama, source, device, setting, compiled=True)
    makes |= {name: partial(_step, p, source, llama.optimizer, mesh) for name, p in programs.items()}
    flops = model_flops(source, llama.SIZE)

    def line(name: str, seconds: float, other: float, host: str, peak: float, loss: str) -> str:
        assert first is not None
        speed, memory = f"{1e3 * seconds:.1f} | {seconds / other:.2f}", f"{peak / 2**30:.2f} | {peak / first.peak:.2f}"
        return f"| {setting} | {name} | {speed} | {host} | {flops / seconds / 1e12:.0f} | {memory} | {loss} |"

    first: Seen | None = None
    for name, make in makes.items():
        try:
            x = looked_at(make, beside, batch, device, rounds)
        except Exception as e:  # a peer that does not run here; shardc has to
            if name == "shardc":
                raise
            yield f"| {setting} | {name} | {type(e).__name__}: {str(e).splitlines()[0][:80]} | | | | | | |"
            continue
        first = first or x
        assert abs(x.loss - first.loss) < 1e-2 * first.loss, f"{setting}, {name}: a loss of {x.loss}, not {first.loss}"
        seconds, host = map(statistics.median, zip(*x.steps, strict=True))
        other = statistics.median(plain for plain, _ in x.plain)

        yield line(name, seconds, other, f"{1e3 * host:.1f}", x.peak, f"{x.loss:.4f}")
        if name in programs:
            cost = programs[name].cost(machine)
            yield line(f"{name}: predicted", cost.step_seconds, other, "", cost.memory.peak, "")


def model_flops(model: Any, size: Any) -> float:
    """Of a step, by the formula that the page names."""
    parameters = sum(p.numel() for p in model.parameters())
    return size.batch * size.seq * (6.0 * parameters + 12.0 * size.layers * size.hidden * size.seq)


def described(s: Any) -> str:
    return f"{s.layers} layers, hidden {s.hidden}, {s.heads} heads, vocabulary {s.vocab}, {s.batch} x {s.seq} tokens"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--machine", help="the device to predict for; default: this one, measured")
    parser.add_argument("--only", choices=list(SETTINGS), help="one setting; prints, and writes nothing")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return 0
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    os.environ["SHARDC_BENCH"] = "gpu" if device.type == "cuda" else "quick"
    import llama
    import lora

    torch.manual_seed(0)
    machine = known_device(options.machine) if options.machine else measure(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    text = HEAD.format(
        machine=name,
        torch=torch.__version__,
        python=platform.python_version(),
        size=described(llama.SIZE),
        small=described(llama.SMALL),
        rounds=options.rounds,
    )
    print(text, end="", flush=True)
    large, beneath = llama.SIZE, ""

    def keep() -> None:
        if device.type == "cuda" and not options.only:
            OUT.write_text(text + beneath)

    for setting in [options.only] if options.only else SETTINGS:
        if setting == LORA:
            beneath = lora.HEAD.replace("{rounds}", str(options.rounds))
            for line in lora.lines(device, machine, options.rounds, not options.no_compile):
                beneath += line + "\n"
                print(line, flush=True)
                keep()
            continue
        llama.SIZE = llama.SMALL if setting.startswith("small") and device.type == "cuda" else large
        source = llama.model()
        for line in rows(llama, source, setting, device, machine, options.rounds, not options.no_compile):
            text += line + "\n"
            print(line, flush=True)
            keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
