"""Measure this machine: what `shardc device --measure` writes.

A device is one process: on a CPU with the threads and the cores that `shardc run` gives it, or with one GPU. Times of
ops are medians of several rounds; of collectives the quickest of several turns counts, of whole steps the usual one.
Other work on the machine counts.

    flops, bandwidth, launch, products, ops
                ops of small pieces of models, forward and backward (shardc.cost.tour), and what fits them
                (shardc.cost.fit), which also says how well shapes that were held back are foretold
    host        what a small op takes beside its own time
    within      collectives of two processes, of several kinds and sizes, one after the other
    skew        what small ones take longer where both compute in between
    reaches.computing
                what both compute while they send: gloo's threads, and NCCL's kernels, take their part
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist

from shardc.cost import whole_steps
from shardc.cost.fit import LinkSample, fit
from shardc.cost.machine_speed import busy
from shardc.cost.tour import SIZES, Tour, tour
from shardc.cost.whole_steps import Compile
from shardc.ir.mesh import Mesh
from shardc.machine.device import Device, Link, Products
from shardc.runtime.mesh import TorchMesh, own_cores
from shardc.runtime.mesh.base import Work

#: Seconds that ops are measured for, about.
SECONDS = 16.0
#: Kinds of collectives, and bytes of the tensors that they are measured with; calls of a small one, and rounds.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MESSAGES = (2**8, 2**12, 2**15, 2**17, 2**20, 3 * 2**20, 2**23, 2**25)
CALLS, ROUNDS = 30, 5
#: Beside ops on matrices of this size: so many collectives, of so many bytes each.
PRODUCT, BUCKETS, BESIDE = {"cpu": 384, "cuda": 4096}, 6, 2**21
#: Products before a sum, by which is found how much later one rank comes than the other.
OPS = (1, 2, 4)
#: What ops are fitted from: what is not measured stays so.
_BEGIN: dict[str, Any] = {"flops": {"float32": 1e11}, "bandwidth": 1e10, "launch": 3e-6}
Kind = Literal["cpu", "cuda"]


def measure(
    kind: Kind | None = None,
    on: Callable[[str], None] = lambda subject: None,
    processes: int | None = None,
    compiled: Compile | None = None,
) -> Device:
    """This machine as a device. kind: default: a GPU where there is one. on: called with what is measured next.
    processes: of a CPU, how many compute at once, each of which is a device then (default: as many as have cores, 2 at
    least and at most). compiled: shardc.compile, by which a CPU's whole steps are made; None: they are left out.
    """
    device = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    count = processes or 2
    threads = _threads(count)
    began, cores, own = time.perf_counter(), busy(), time.process_time()
    each: list[Measured] = []
    if device.type == "cpu":
        on(f"{count} processes at once")
        each = _in_processes("gloo", threads, count, compiled)
        ops, links, how = each[0].ops, each[0].links, f"gloo between {count} processes of this machine"
        assert ops is not None
        ours = time.process_time() - own + sum(x.computed for x in each)
        others = max(busy() - cores - ours, 0.0) / ((time.perf_counter() - began) * _cores())
        how += f", while other work took {others:.0%} of its cores"
    else:
        ops = tour(device, SECONDS, on)
        on("links between processes")
        links, how = _links(device)
    link = Link(bandwidth=1e9, latency=1e-5)
    begin = Device(
        name=device.type,
        kind="gpu" if device.type == "cuda" else "cpu",
        memory=_memory(device, threads),
        products=_products(device),
        host=ops.host,
        node=max(_devices(device, threads), count),  # the processes that were measured
        within=link,
        between=link,
        **_BEGIN,
    )
    found = fit(begin, ops.samples, links.samples)
    source = f"{_name(device, threads)}, measured {date.today()}, torch {torch.__version__}; link: {how}; {found}"
    reaches = found.device.reaches.model_copy(update={"computing": links.computing})
    node = processes or _devices(device, threads)
    update = {"source": source, "node": node, "reaches": reaches, "skew": links.skew}
    if device.type == "cpu":
        update["reference"] = ops.reference
    measured = found.device.model_copy(update=update)
    steps = [x.steps for x in each if x.steps is not None]
    if not steps or compiled is None:
        return measured
    on("steps against their prices")
    prices = [
        whole_steps.price(program, measured) for program, _, _ in whole_steps.cases(compiled, count, whole_steps.SIZES)
    ]
    return whole_steps.fitted(measured, steps, prices)


def _products(device: torch.device) -> Products | None:
    """Of a GPU, the tiles that libraries choose from; of a CPU they are found by fitting."""
    if device.type == "cpu":
        return None
    units = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.55))  # as in the files of this package
    return Products(tiles=tiles, units=units, ramp=250.0, unaligned={2: 0.2, 4: 0.4})


@dataclass(frozen=True)
class Links:
    """Collectives; the share of what is computed alone that is computed beside them; the seconds by which ranks that
    have computed come to them one after the other.
    """

    samples: list[LinkSample]
    computing: float = 1.0
    skew: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What one of several processes found, all of which did the same at once. computed: seconds of its cores."""

    links: Links
    ops: Tour | None = None
    steps: list[list[whole_steps.Turn]] | None = None
    computed: float = 0.0


def _links(device: torch.device) -> tuple[Links, str]:
    """Of GPUs: what was measured, and what it went through."""
    if torch.cuda.device_count() > 1:
        return _in_processes("nccl", 1, 2)[0].links, "NCCL between two GPUs of this machine"
    there = torch.zeros(MESSAGES[-1], dtype=torch.uint8, pin_memory=True)
    here = torch.zeros_like(there, device=device)
    copies = [LinkSample("send_recv", n, (0, 1), _copy_seconds(here[:n], there[:n])) for n in MESSAGES]
    return Links(copies), "there is only one GPU: copies from the machine's memory instead"


def _copy_seconds(here: torch.Tensor, there: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        here.copy_(there)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


@dataclass(frozen=True)
class _Sizes:
    """What is measured in processes, which do not see what a test has changed here."""

    messages: tuple[int, ...]
    calls: int
    rounds: int
    beside: int
    seconds: float
    pieces: tuple[tuple[int, int], ...]
    decoders: tuple[tuple[int, int], ...]
    steps: int


def _in_processes(backend: str, threads: int, count: int, compiled: Compile | None = None) -> list[Measured]:
    """So many processes with so many threads each, which are started here and end here."""
    sizes = _Sizes(MESSAGES, CALLS, ROUNDS, BESIDE, SECONDS, SIZES["cpu"], whole_steps.SIZES, whole_steps.STEPS)
    with (
        tempfile.TemporaryDirectory(prefix="shardc-links-") as folder,
        ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool,
    ):
        process = partial(
            _process, count=count, backend=backend, threads=threads, folder=folder, sizes=sizes, compiled=compiled
        )
        return list(pool.map(process, range(count)))


def _process(
    rank: int, count: int, backend: str, threads: int, folder: str, sizes: _Sizes, compiled: Compile | None
) -> Measured:
    """One of them: ops, each collective as TorchMesh makes it, and steps; of GPUs, collectives alone."""
    torch.set_num_threads(threads)
    if backend == "gloo":
        own_cores.use(rank, count)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    cpu = device.type == "cpu"
    ops = tour(device, sizes.seconds, sizes=sizes.pieces) if cpu else None
    dist.barrier()
    mesh = TorchMesh(Mesh((("ranks", count),)), device=device, watch=0)
    calls, rounds = sizes.calls, sizes.rounds
    each: list[tuple[str, int, Callable[[], Any], int]] = []
    for nbytes in sizes.messages:
        x = torch.zeros(count, nbytes // (4 * count), device=device)
        ways: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(mesh.all_reduce, x, ("ranks",)),
            "all_gather": partial(_gathered, mesh, x),
            "reduce_scatter": partial(mesh.reduce_scatter, x, "ranks"),
            "all_to_all": partial(mesh.all_to_all, x, "ranks"),
        }
        often = max(min(calls, 2**24 // nbytes), 1)
        each += [(kind, nbytes, ways[kind], often) for kind in KINDS]
    found = _links_in_turns(each, device, rounds, tuple(range(count)))
    computing, skew = _computing_beside(mesh, device, sizes.beside, rounds), _skew(mesh, device, calls, rounds)
    steps = whole_steps.run(compiled, count, sizes.decoders, sizes.steps) if cpu and compiled is not None else None
    dist.destroy_process_group()
    return Measured(Links(found, computing, skew), ops, steps, time.process_time())


def _gathered(mesh: TorchMesh, x: torch.Tensor) -> None:
    """As ZeRO does, into the place where this rank's part lies already. x: [ranks, numbers of each]."""
    mesh.start_all_gather(x[mesh.rank], x.view(-1), "ranks").wait()


def _links_in_turns(
    each: Sequence[tuple[str, int, Callable[[], Any], int]], device: torch.device, rounds: int, ranks: tuple[int, ...]
) -> list[LinkSample]:
    """Of (kind, bytes, call, how many times) each the quickest of its rounds, in which all take turns: what slows the
    machine down for a second does so to a round of some, not to all of one.
    """
    took = [[_call_seconds(call, device, often, 1) for _, _, call, often in each] for _ in range(rounds)]
    return [LinkSample(x[0], x[1], ranks, min(some)) for x, some in zip(each, zip(*took, strict=True), strict=True)]


def _skew(mesh: TorchMesh, device: torch.device, calls: int, rounds: int) -> float:
    """Both ranks compute a while, differently long by chance, and meet in a small sum: what that takes longer than the
    ops and the sums apart. The mean over a few lengths: what makes ranks late, such as a thread that has to be woken,
    is there in each of them.
    """
    n = PRODUCT[device.type]
    weight, small = torch.ones(n, n, device=device), torch.zeros(64, device=device)
    meet = partial(mesh.all_reduce, small, ("ranks",))

    def step(ops: int, sums: int) -> None:
        for _ in range(ops):
            torch.mm(weight, weight)
        for _ in range(sums):
            meet()

    alone = _call_seconds(meet, device, calls, rounds)
    late = []
    for ops in OPS:
        apart, together = (_call_seconds(partial(step, ops, sums), device, calls, rounds) for sums in (0, 1))
        late.append(together - apart - alone)
    return max(statistics.mean(late), 0.0)


def _computing_beside(mesh: TorchMesh, device: torch.device, nbytes: int, rounds: int) -> float:
    """The share of its rate at which computing goes on beside collectives. Where some collectives take a seconds alone,
    some ops b, and both together c, then a + b - c seconds' worth of ops were computed in the a seconds of collectives.
    """
    n, ranks = PRODUCT[device.type], mesh.layout.world
    weight, x, flat = (torch.ones(n, k, device=device) for k in (n, n, max(nbytes // 4 // n // ranks, 1) * ranks))
    whole, part = flat.view(-1), torch.ones(flat.numel() // ranks, device=device)
    collectives: dict[str, Callable[[], Work]] = {
        "all_reduce": lambda: mesh.start_all_reduce(whole, ("ranks",)),
        "all_gather": lambda: mesh.start_all_gather(part, whole, "ranks"),
        "reduce_scatter": lambda: mesh.start_reduce_scatter(whole, part, "ranks"),
    }

    def ops(count: int) -> None:
        for _ in range(count):
            ((x @ weight) * x).add_(x)

    one = _call_seconds(partial(ops, 1), device, 10, rounds)
    shares = []
    for start in collectives.values():

        def both(count: int, start: Callable[[], Work] = start) -> None:
            works = [start() for _ in range(BUCKETS)]
            ops(count)
            for work in works:
                work.wait()

        alone = _call_seconds(partial(both, 0), device, 3, rounds)
        count = math.ceil(2 * alone / one)
        apart, together = (_call_seconds(partial(run, count), device, 3, rounds) for run in (ops, both))
        shares.append((alone + apart - together) / alone)
    return min(max(statistics.mean(shares), 0.05), 1.0)


def _call_seconds(call: Callable[[], Any], device: torch.device, calls: int, rounds: int) -> float:
    """Seconds of one call: the median of the rounds' means."""
    means = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        means.append((time.perf_counter() - begin) / calls)
    return statistics.median(means)


def _memory(device: torch.device, threads: int) -> float:
    """Bytes of a GPU, or one CPU device's part of the machine's memory that this process may have."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total / _devices(device, threads)


def _devices(device: torch.device, threads: int) -> int:
    """How many devices this machine has."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return max(_cores() // threads, 1)


def _threads(processes: int) -> int:
    """Of one of so many processes, as `shardc run` starts it."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(_cores() // processes, 1))


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _name(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return f"{model}, {threads} thread{'s' if threads > 1 else ''} a process"
