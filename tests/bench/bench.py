"""Step time and peak memory of shardc against its peers (`make bench`): 2 processes of 1 thread, gloo, or one.

Time: the contenders of a group (contenders.PARTS) take turns, a few steps each, round after round: what the machine
does meanwhile falls on all alike. A ratio is the median over rounds of (median step of the one / median step of the
other).
CPU: processor time of a step, both processes and all their threads; steadier than the clock where the machine is
shared.
Memory: each contender in two fresh processes; the peak of resident memory during steps, less what was there after
imports.
Experts: bytes of their parameters and optimizer state, of the tensors that a rank has after a step.
Overlap: in the same steps, of the time in which ours sums gradients, or gathers parameters, in the background, how much
it waits. Every contender starts from the same weights and gets the same batches; the run fails if their losses differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median as middle
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
COMPILED = ["compiled-GPT", "compiled-Llama", "compiled-Mixtral", "compiled-element-wise"]
PARTS = ["tensor", "zero", "checkpoint", "experts", "checks", "pipeline", *COMPILED]
Round = dict[str, dict[str, list[float]]]  # {contender: {"wall", "cpu": seconds of each step}}


def main(parts: list[str], rounds: int, steps: int, out: Path | None) -> int:
    import contenders
    from world import World

    results: dict[str, Any] = {}
    for part in parts:
        groups = contenders.PARTS[part]
        names = list(dict.fromkeys(n for g in groups for n in g.names))
        with tempfile.TemporaryDirectory(prefix="shardc-bench-") as folder:
            files = Path(folder)
            result = results[part] = about(prepare(files, names), rounds, steps)
            if part in COMPILED:
                result["processes"] = "1 or 2 processes"
            result["contenders"], result["ratios"], losses = {}, [], {}
            for group in groups:
                timed, facts = take_turns(group.names, files, rounds, steps)
                losses |= facts["losses"]
                result["contenders"] |= {
                    n: {k: 1000 * middle(t for r in timed for t in r[n][k]) for k in ("wall", "cpu")}
                    for n in group.names
                }
                result["contenders"][group.ours]["overlap"] = facts["overlap"]
                result["ratios"] += [ratio(timed, group.ours, peer, group.target) for peer in group.peers]
            for name in names:
                with World(name, files, frugal=True) as world:
                    result["contenders"][name]["mib"] = world.ask("peak", steps=2)
                    if part == "experts":
                        result["contenders"][name]["experts"] = world.ask("experts")
                print(f"{name}: {result['contenders'][name]}", flush=True)
        first = losses[names[0]]
        result["worst_loss_difference"] = max(
            abs(a - b) / abs(b) for n in names for a, b in zip(losses[n], first, strict=True)
        )
    print("\n\n".join(table(r) for r in results.values()))
    if out:
        kept = json.loads(out.read_text()) if out.exists() else {}
        kept = {part: results.get(part, kept.get(part)) for part in contenders.PARTS}
        out.write_text(json.dumps(kept, indent=1) + "\n")
        into_docs(kept)
    return 0 if all(r["worst_loss_difference"] < 1e-4 for r in results.values()) else 1


def prepare(files: Path, names: list[str]) -> Any:
    """Compile what of `names` is ours, and write the weights that all begin with, into `files`. Gives the model."""
    import contenders
    import llama
    import torch
    from safetensors.torch import save_file

    import shardc
    from shardc import specs

    torch.manual_seed(0)
    model = contenders.model(names[0])
    save_file({k: x.contiguous() for k, x in model.state_dict().items()}, files / "weights.safetensors")
    for name in names:
        if name in contenders.SHARDC:
            ours = contenders.SHARDC[name]
            spec: Any = specs.path(ours.spec) if ours.spec else {"shardc": 1, "mesh": ours.mesh}
            program = shardc.compile(model, llama.batch(), spec, mesh=ours.mesh, overrides=ours.settings, prove=False)
            program.save(files / name)
    return model


def about(model: Any, rounds: int, steps: int) -> dict[str, Any]:
    import llama
    import torch

    s, parameters = llama.SIZE, sum(p.numel() for p in model.parameters())
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "torch": torch.__version__,
        "rounds": rounds,
        "steps": steps,
        "model": (
            f"{type(model).__name__.removesuffix('ForCausalLM')}, {model.config.num_hidden_layers} layers, hidden"
            f" {s.hidden}, vocabulary {s.vocab}, {parameters / 1e6:.1f} M parameters"
        ),
        "batch": f"{s.batch} x {s.seq} tokens",
    }


def take_turns(names: tuple[str, ...], files: Path, rounds: int, steps: int) -> tuple[list[Round], dict[str, Any]]:
    """What each round took; and {"losses": everyone's first ones, "overlap": of the first name}."""
    from world import World

    times: list[Round] = []
    with ExitStack() as stack:
        worlds = {name: stack.enter_context(World(name, files)) for name in names}
        losses = {name: world.ask("build", steps=2) for name, world in worlds.items()}
        worlds[names[0]].ask("overlap")  # not of the first steps
        for r in range(rounds):
            turns = names[r % len(names) :] + names[: r % len(names)]  # nobody is always first
            times.append({name: worlds[name].ask("time", steps=steps) for name in turns})
            took = ", ".join(f"{n} {1000 * middle(times[-1][n]['wall']):.0f}" for n in names)
            print(f"round {r + 1} of {rounds}: {took}", flush=True)
        return times, {"losses": losses, "overlap": worlds[names[0]].ask("overlap")}


def ratio(timed: list[Round], ours: str, peer: str, target: float) -> dict[str, Any]:
    ratios_by_clock = {k: sorted(middle(r[ours][k]) / middle(r[peer][k]) for r in timed) for k in ("wall", "cpu")}
    middles = {k: middle(ratios) for k, ratios in ratios_by_clock.items()}
    return {
        "shardc": ours,
        "peer": peer,
        "target": target,
        **middles,
        "low": ratios_by_clock["wall"][0],
        "high": ratios_by_clock["wall"][-1],
    }


def table(r: dict[str, Any]) -> str:
    """A part's result as Markdown."""
    who = r["contenders"]
    lines = [
        (
            f"{r['model']}, batch {r['batch']}, AdamW, {r.get('processes', '2 processes')} x 1 thread, gloo; {r['date']}, {r['machine']}, torch"
            f" {r['torch']}."
        ),
        (
            f"Contenders take turns: {r['rounds']} rounds of {r['steps']} steps each. First losses agree to"
            f" {r['worst_loss_difference']:.0e}."
        ),
        "",
        "| | step, ms | peak memory, MiB | against | time | rounds | target | CPU | memory |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for x in r["ratios"]:
        ours, peer = who[x["shardc"]], who[x["peer"]]
        lines.append(
            f"| {x['shardc']} | {ours['wall']:.0f} | {ours['mib']:.0f} | {x['peer']}: {peer['wall']:.0f} ms,"
            f" {peer['mib']:.0f} MiB | {x['wall']:.2f}x | {x['low']:.2f}-{x['high']:.2f} | {x['target']:.2f}x |"
            f" {x['cpu']:.2f}x | {ours['mib'] / peer['mib']:.2f}x |"
        )
    if expert := {n: v["experts"] for n, v in who.items() if "experts" in v}:
        first = r["ratios"][0]["shardc"]
        shown = ", ".join(
            f"{n} {mib:.1f} MiB" + (f" ({expert[first] / mib:.2f}x)" if n != first else "") for n, mib in expert.items()
        )
        lines += ["", f"Parameters and optimizer state of experts on a rank, measured: {shown}."]
    background = {n: v["overlap"] for n, v in who.items() if any(s["seconds"] for s in v.get("overlap", {}).values())}
    if background:
        lines += [
            "",
            (
                "| in the background, ms a step | gradient sums | waited for | overlapped | parameter gathers | waited"
                " for | overlapped |"
            ),
            "|---|---:|---:|---:|---:|---:|---:|",
            *(f"| {n} | {_overlap(v['sums'])} | {_overlap(v['gathers'])} |" for n, v in background.items()),
        ]
    return "\n".join(lines)


def _overlap(s: dict[str, float]) -> str:
    if not s["seconds"]:
        return "- | - | -"
    return f"{1000 * s['seconds']:.0f} | {1000 * s['waited']:.0f} | {1 - s['waited'] / s['seconds']:.0%}"


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor()}"


def summary(kept: dict[str, Any]) -> str:
    """One line: the range of step-time ratios against each library."""
    by_peer: dict[str, list[float]] = {}
    for part, result in kept.items():
        for x in result["ratios"] if result else ():
            library = x["peer"].partition(",")[0].split(" ")[0]
            if library == "shardc":  # with and without something of its own
                continue
            by_peer.setdefault("torch's pipelining" if part == "pipeline" else library, []).append(x["wall"])
    shown = [
        f"{name} {min(r):.2f}" + (f"-{max(r):.2f}" if max(r) - min(r) > 0.005 else "") for name, r in by_peer.items()
    ]
    ratios = ", ".join(shown)
    return f"shardc's step time / [the library's](docs/measured/benchmarks.md), 2 CPU processes:\n{ratios}."


def into_docs(kept: dict[str, Any]) -> None:
    """The tables go to docs/measured/benchmarks.md, one line of summary to README."""
    from docs.generate import write

    write(ROOT / "docs" / "measured/benchmarks.md", {"bench": "\n\n".join(table(r) for r in kept.values() if r)})
    write(ROOT / "README.md", {"bench": summary(kept)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="a part; docs/measured/benchmarks.md keeps the others"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="steps of each contender in a round")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the harness; implies --dry")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="print only: leave docs/measured/bench.json, docs/measured/benchmarks.md and README.md alone",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        os.environ["SHARDC_BENCH"] = "quick"  # before processes start
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    save = None if arguments.dry or arguments.quick else ROOT / "docs" / "measured" / "bench.json"
    sys.exit(main(arguments.only or PARTS, arguments.rounds, arguments.steps, save))
