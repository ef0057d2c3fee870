"""Step time and peak memory of shardc against DDP and DTensor (`make bench`): 2 processes of 1 thread, gloo.

Time: all contenders live in the same two processes and take turns, a few steps each, round after round: what the machine does
meanwhile falls on all alike. A ratio is the median over rounds of (median step of the one / median step of the other).
Memory: each contender alone in two fresh processes; the peak of resident memory during steps, less what was there after imports.
Every contender starts from the same weights and gets the same batches; the run fails if their losses differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def parent(rounds: int, steps: int, out: Path | None) -> int:
    import contenders
    import llama
    import torch
    from safetensors.torch import save_file

    import shardc
    from shardc import specs
    from shardc.mesh import Mesh
    from shardc.runtime.launch import launch

    with tempfile.TemporaryDirectory(prefix="shardc-bench-") as folder:
        files = Path(folder)
        torch.manual_seed(0)
        model = llama.model()
        save_file({k: x.contiguous() for k, x in model.state_dict().items()}, files / "weights.safetensors")
        parameters = sum(p.numel() for p in model.parameters())
        for name, (spec, mesh) in contenders.SHARDC.items():
            sizes = {a: int(n) for a, _, n in (pair.partition("=") for pair in mesh.split(","))}
            shardc.compile(model, llama.batch(), specs.path(spec), mesh=sizes, prove=False).save(files / name)

        def world(*args: str, env: dict[str, str] | None = None) -> None:
            os.environ |= {"OMP_NUM_THREADS": "1", **(env or {})}
            code = launch([sys.executable, str(Path(__file__)), "--files", folder, *args], Mesh((("rank", 2),)))
            if code:
                sys.exit(code)

        world("--worker", "time", "--rounds", str(rounds), "--steps", str(steps))
        timed = json.loads((files / "time.json").read_text())
        memory = {}
        for name in contenders.NAMES:
            # blocks above 64 KiB go back to the system when freed: resident memory then follows the live tensors
            world("--worker", "memory", "--name", name, env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"})
            memory[name] = json.loads((files / "memory.json").read_text())
    result = summary(timed, memory, contenders.PAIRS, contenders.NAMES)
    result |= {
        "date": datetime.date.today().isoformat(), "machine": machine(), "torch": torch.__version__, "rounds": rounds, "steps": steps,
        "model": f"Llama, {llama.LAYERS} layers, hidden {llama.HIDDEN}, vocabulary {llama.VOCAB}, {parameters / 1e6:.1f} M parameters",
        "batch": f"{llama.BATCH} x {llama.SEQ} tokens",
    }  # fmt: skip
    text = table(result)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        into_readme(text)
    return 0 if result["equal"] else 1


def summary(timed: dict[str, Any], memory: dict[str, float], pairs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Medians, and ratios by round. timed: {"rounds": [{name: [seconds, ...]}], "losses": {name: [...]}}; memory: MiB."""
    rows = {n: {"ms": 1000 * statistics.median(t for r in timed["rounds"] for t in r[n]), "mib": memory[n]} for n in names}
    ratios = []
    for ours, theirs in pairs.items():
        for peer, target in theirs:
            by_round = sorted(statistics.median(r[ours]) / statistics.median(r[peer]) for r in timed["rounds"])
            ratios.append(
                {
                    "shardc": ours, "peer": peer, "target": target, "time": statistics.median(by_round), "low": by_round[0],
                    "high": by_round[-1], "memory": memory[ours] / memory[peer],
                }
            )  # fmt: skip
    first = timed["losses"][names[0]]
    worst = max(abs(a - b) / abs(b) for n in names for a, b in zip(timed["losses"][n], first, strict=True))
    return {"contenders": rows, "ratios": ratios, "worst_loss_difference": worst, "equal": worst < 1e-4}


def table(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"{r['model']}, batch {r['batch']}, AdamW, 2 processes x 1 thread, gloo; {r['date']}, {r['machine']}, torch {r['torch']}.",
        f"Contenders take turns: {r['rounds']} rounds of {r['steps']} steps each. First losses agree to {r['worst_loss_difference']:.0e}.",
        "", "| | step, ms | peak memory, MiB |", "|---|---:|---:|",
        *(f"| {n} | {v['ms']:.0f} | {v['mib']:.0f} |" for n, v in r["contenders"].items()),
        "", "| | against | time | rounds | target | memory |", "|---|---|---:|---:|---:|---:|",
        *(
            f"| {x['shardc']} | {x['peer']} | {x['time']:.2f}x | {x['low']:.2f}-{x['high']:.2f} | {x['target']:.2f}x | {x['memory']:.2f}x |"
            for x in r["ratios"]
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def machine() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor()}"


def into_readme(text: str) -> None:
    file = ROOT / "README.md"
    old = file.read_text()
    head, begin, rest = old.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, f"README.md lacks the marker {BEGIN}"
    assert end, f"README.md lacks the marker {END}"
    file.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


# --- in each of the two processes


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    files = Path(args.files)
    if args.worker == "time":
        found: Any = take_turns(files, args.rounds, args.steps)
    else:
        found = peak(args.name, files)
    if dist.get_rank() == 0:
        (files / f"{args.worker}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def take_turns(files: Path, rounds: int, steps: int) -> dict[str, Any]:
    import contenders
    import llama
    import torch.distributed as dist

    say = print if dist.get_rank() == 0 else (lambda *_, **__: None)
    run = {name: contenders.build(name, files) for name in contenders.NAMES}
    losses = {name: [step(llama.batch(i)) for i in range(2)] for name, step in run.items()}  # these warm up, too
    times: list[dict[str, list[float]]] = []
    for r in range(rounds):
        times.append({})
        for name in list(run)[r % len(run) :] + list(run)[: r % len(run)]:  # nobody is always first
            took = times[-1][name] = []
            for i in range(steps):
                batch = llama.batch(i)
                dist.barrier()
                start = time.perf_counter()
                run[name](batch)
                dist.barrier()
                took.append(time.perf_counter() - start)
        say(f"round {r + 1} of {rounds}: " + ", ".join(f"{n} {1000 * statistics.median(t):.0f}" for n, t in times[-1].items()), flush=True)
    return {"rounds": times, "losses": losses}


def peak(name: str, files: Path) -> float:
    """MiB: the largest over ranks of resident memory's peak during steps, less what was resident after imports."""
    import contenders
    import llama
    import torch
    import torch.distributed as dist

    import shardc.runtime.engine  # noqa: F401  (what a contender imports is not its memory; all import the same)

    before = _resident("VmRSS")
    step = contenders.build(name, files)
    step(llama.batch())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: building is not stepping
    for i in range(3):
        step(llama.batch(i))
    found = torch.tensor(_resident("VmHWM") - before)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found) / 1024


def _resident(key: str) -> float:
    """KiB."""
    return next(float(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender in a round")
    parser.add_argument("--dry", action="store_true", help="print only: leave docs/bench.json and README.md alone")
    parser.add_argument("--worker", choices=["time", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--files", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
    else:
        sys.exit(parent(arguments.rounds, arguments.steps, None if arguments.dry else ROOT / "docs" / "bench.json"))
