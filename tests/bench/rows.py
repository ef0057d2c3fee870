"""What balancing rows gains over gloo, and what was predicted: 2 processes of one thread, alternating in one run.

    shardc device --measure && .venv/bin/python -m tests.bench.rows [steps] [timed | shared]     a minute

Each step is taken three times on the same rows: as long as the longest row; each microbatch with its own length, rows
as they come; balanced. Losses are compared, seconds are summed. `docs/measured/rows.md` has the table.
`timed`: a microbatch's seconds are fitted to three that were timed here, and not to the program's cost.
`shared`: two ranks share each row (context parallel); short rows on one rank, in turn with all rows on both.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LONGEST, WIDTH, LAYERS, VOCABULARY = 32, 1024, 256, 4, 2048
LENGTHS = [64, 128, 256, 384, 512, 768, 1024]
SPEC = {
    "shardc": 1,
    "mesh": {"dp": 2},
    "batch": {"microbatches": 16, "lengths": LENGTHS, "pad": {"ids": 0, "labels": -100}, "balance": True},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(*s) for n, s in sizes.items()}) for _ in range(LAYERS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids)
        for layer in self.layers:
            q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in layer["qkv"](h).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            h = h + layer["out"](y)
            h = h + layer["down"](F.silu(layer["up"](h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Talks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Lengths as those of public sets for fine-tuning: log-normal, with a heavy tail."""

    def __init__(self, rows: int) -> None:
        draw = random.Random(0)
        self.lengths = [min(LONGEST, max(8, int(draw.lognormvariate(5.0, 1.0)))) for _ in range(rows)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(1, VOCABULARY, (self.lengths[i],), generator=torch.Generator().manual_seed(i))
        return {"ids": ids, "labels": ids.roll(-1)}


def timed(net: nn.Module, length: int) -> float:
    """Seconds that this process computes for a row of this length: the least of five."""
    ids, least = torch.ones(1, length, dtype=torch.int64), float("inf")
    for _ in range(5):
        begin = time.process_time()
        net(ids, ids).backward()
        least = min(least, time.process_time() - begin)
    return least


def measured(rank: int, steps: int, from_time: bool) -> dict[str, Any]:
    """Seconds of each way, measured and predicted."""
    import dataclasses

    import torch.distributed as dist

    import shardc
    from shardc.features.rows.arrangement import Priced, arranged, as_they_come
    from shardc.features.rows.seconds import OfSizes, Seconds, fitted, of_cost, spread
    from shardc.runtime.data.ragged import Ragged

    ids = torch.zeros(ROWS, LONGEST, dtype=torch.int64)
    net = Model()
    program = shardc.compile(net, {"ids": ids, "labels": ids}, SPEC)
    engine = program.engine(net, lambda params: torch.optim.SGD(params, lr=0.0))
    data = Talks(ROWS * steps)
    loader = engine.loader(data, shuffle=False)
    step, m = loader.balance.step, program.microbatches
    cost = program.cost("cpu") if program.spec.device is None else program.cost()
    rest = cost.step_seconds - m * of_cost(cost)
    if from_time:
        terms = torch.tensor(dataclasses.astuple(fitted({n: timed(Model(), n) for n in spread(LENGTHS)})))
        dist.broadcast(terms, 0)
        step = dataclasses.replace(step, seconds=OfSizes({1: Seconds(*terms.tolist())}))
    collate = loader._collate.args[0]

    def part(samples: list[int], p: Priced) -> Ragged:
        cells = p.groups[rank]
        parts = tuple(collate([data[samples[i]] for i in cell.rows]) for cell in cells)
        every = {cell.size for cells in p.groups for cell in cells}
        return Ragged(parts, tuple(cell.size for cell in cells), tuple(sorted(every)))

    spent: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}
    expected: dict[str, list[float]] = {}
    for number in range(-1, steps):  # one to warm up
        samples = list(range(max(number, 0) * ROWS, (max(number, 0) + 1) * ROWS))
        rows = [loader.balance.rows[i] for i in samples]
        long = dataclasses.replace(step, sizes=(step.fitting(max(r.length for r in rows))[0],))
        ways = {
            "one length": as_they_come(long, rows),
            "as they come": as_they_come(step, rows),
            "balanced": arranged(step, rows),
        }
        losses = []
        for name, p in ways.items():
            given = part(samples, p)
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            losses.append(float(engine.step(given, local=True)))
            busy = time.process_time() - busy
            dist.barrier()
            if number >= 0:
                spent.setdefault(name, []).append(time.perf_counter() - begin)
                computed.setdefault(name, []).append(busy)
                expected.setdefault(name, []).append(p.seconds + rest)
        assert max(losses) - min(losses) < 1e-5, losses
    return {"measured": spent, "computed": computed, "predicted": expected}


def on_fewer_ranks(rank: int, steps: int) -> dict[str, list[float]]:
    """Seconds of both ways, measured and predicted, without those of the first step."""
    import dataclasses

    import torch.distributed as dist

    import shardc

    ids = torch.zeros(ROWS, LONGEST, dtype=torch.int64)
    net, spec = Model(), {**SPEC, "mesh": {"cp": 2}, "sequence": {"axis": "cp"}}
    spec["batch"] = {**SPEC["batch"], "microbatches": ROWS}  # type: ignore[dict-item]
    program = shardc.compile(net, {"ids": ids, "labels": ids}, spec)
    engine = program.engine(net, lambda params: torch.optim.SGD(params, lr=0.0))
    loaders = {n: engine.loader(Talks(ROWS * (steps + 1)), shuffle=False, name=n) for n in ("on both", "short on one")}
    balance = loaders["on both"].balance
    balance.step = dataclasses.replace(balance.step, sizes=tuple(s for s in balance.step.sizes if s.times == 1))
    took: dict[str, list[float]] = {n: [0.0, 0.0] for n in loaders}
    for number, parts in enumerate(zip(*loaders.values(), strict=True)):
        losses = []
        for (name, loader), part in zip(loaders.items(), parts, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            losses.append(float(engine.step(part, local=True)))
            dist.barrier()
            if number:
                took[name][0] += time.perf_counter() - begin
                rows = range(number * ROWS, (number + 1) * ROWS)
                took[name][1] += loader.balance._priced(tuple(rows)).seconds
        assert max(losses) - min(losses) < 1e-5, losses
    return took


def main(steps: str = "12", how: str = "") -> None:
    from tests.bench.gloo import on_ranks

    if how == "shared":
        took = on_ranks(on_fewer_ranks, 2, int(steps))[0]
        for name, (seconds, predicted) in took.items():
            print(f"| {name} | {seconds / int(steps):.3f} | {predicted / int(steps):.3f} |")
        both, one = took.values()
        print(f"as fast: {both[0] / one[0]:.2f}, predicted {both[1] / one[1]:.2f}")
        return
    ranks = on_ranks(measured, 2, int(steps), how == "timed")
    found = ranks[0]
    for name, busy in found["computed"].items():  # of the rank that computes longest in each step
        found["computed"][name] = [max(x) for x in zip(busy, *(r["computed"][name] for r in ranks[1:]), strict=True)]
    total = {kind: {name: sum(x) for name, x in some.items()} for kind, some in found.items()}
    print(
        "| rows | step, s | slowest rank computes, s | predicted, s | as fast as rows as they come | computed | predicted |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in found["measured"]:
        seconds = [f"{total[kind][name] / int(steps):.3f}" for kind in total]
        gains = [total[kind]["as they come"] / total[kind][name] for kind in total]
        print(f"| {name} | {' | '.join(seconds)} | {' | '.join(f'{gain:.2f}' for gain in gains)} |")
    shares = [(gain - 1) / (gains[-1] - 1) for gain in gains]
    print(f"of the predicted gain of balancing: {shares[0]:.2f} by the clock, {shares[1]:.2f} of what ranks compute")


if __name__ == "__main__":
    main(*sys.argv[1:])
