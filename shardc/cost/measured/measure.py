"""Measure this machine for `shardc device --measure`.

A device is one process: on a CPU with the threads and the cores that `shardc run` uses, or with one GPU.

    ops           products, copies and small pieces of models, forward and backward, in several sizes; each op is timed
                  (shardc.cost.measured.op_times), and the median of its rounds counts
    collectives   of two processes, by kind and size, one after the other; the fastest of several rounds counts
    rates         least squares: a copy takes launch + bytes / bandwidth, a product also flops / rate of its dtype; a
                  collective takes latency and bytes / bandwidth as shardc.machine.collectives counts them
    single ops    ops whose median is more than `OWN` off these rates get their own
    host          the time of a small op beside its own work
    computing     the rate of ops beside collectives: gloo's threads and NCCL's kernels take their part

Other work on the machine distorts the results.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from shardc.cost.measured.op_times import OpTimes
from shardc.ir.mesh import Mesh
from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device, Link, OpRates, Reaches, format_of
from shardc.machine.work import Op
from shardc.runtime.mesh import TorchMesh, own_cores
from shardc.runtime.mesh.allocator import keep_freed
from shardc.runtime.mesh.base import Work

#: Rounds of all ops, and of all collectives; calls of a small collective.
OP_ROUNDS, ROUNDS, CALLS = 5, 5, 30
#: (tokens, hidden size) of the pieces.
SIZES = {
    "cpu": ((16, 32), (64, 64), (128, 96), (256, 128), (256, 384), (512, 256), (1024, 512)),
    "cuda": ((256, 256), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 3072), (16384, 2048)),
}
#: Kinds of collectives, and bytes of the tensors for measuring them.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MESSAGES = (2**8, 2**12, 2**15, 2**17, 2**20, 3 * 2**20, 2**23, 2**25)
#: For `computing`: the size of the matrices of products; the number of collectives beside them, and bytes of each.
PRODUCT, BUCKETS, BESIDE = {"cpu": 384, "cuda": 4096}, 6, 2**21
#: Ops that compute almost nothing: their seconds show the memory's bandwidth.
COPIES = ("add", "mul", "sub", "copy_", "clone", "_to_copy")
#: An op gets its own rates if its median is more than this share off.
OWN = 0.1
VOCABULARY, HEAD, LENGTH, LAYERS = 1000, 32, 64, 8
#: Calls of an attention kernel with more than one in so many flops of its largest are large.
LARGE = 5
#: Tokens of long rows, for attention.
LONG = {"cpu": 512, "cuda": 4096}
Kind = Literal["cpu", "cuda"]
_NO_LINK = Link(bandwidth=1.0, latency=0.0)
#: A collective: its kind, its bytes, and the number of ranks.
Message = tuple[str, int, int]


@dataclass(frozen=True)
class Measured:
    """The results of one process. ops, links: seconds of each; host: those that a small op takes beside its own.

    computing: the share of its rate at which a device computes beside collectives.
    """

    ops: Mapping[Op, float] = field(default_factory=dict)
    host: float = 0.0
    links: Mapping[Message, float] = field(default_factory=dict)
    computing: float = 1.0


def measure(
    kind: Kind | None = None, on: Callable[[str], None] = lambda subject: None, processes: int | None = None
) -> Device:
    """Measure this machine. kind: default: a GPU if there is one. on: called with the next subject.

    processes: of a CPU, how many compute at once, each of which is a device (default: 2).
    """
    device = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    count = processes or 2
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(_cores() // count, 1))
    devices = torch.cuda.device_count() if device.type == "cuda" else max(_cores() // threads, 1)
    if device.type == "cpu":
        on(f"{count} processes at once")
        measured = _in_processes("gloo", threads, count)
        how = f"gloo between {count} processes of this machine"
    else:
        on("ops")
        measured = Measured(*_ops(device, SIZES["cuda"], OP_ROUNDS))
        on("links between processes")
        if devices > 1:
            between, how = _in_processes("nccl", 1, 2), "NCCL between two GPUs of this machine"
        else:
            between, how = Measured(links=_copies(device)), "there is only one GPU: copies from the host instead"
        measured = replace(measured, links=between.links, computing=between.computing)
    rates, link = fit(measured.ops), fit_link(measured.links)
    return Device(
        name=device.type,
        source=f"{_name(device, threads)}, measured {date.today()}, torch {torch.__version__}; link: {how}",
        kind="gpu" if device.type == "cuda" else "cpu",
        memory=_memory(device) / (1 if device.type == "cuda" else devices),
        host=measured.host,
        node=processes or devices,
        within=link,
        between=link,
        reaches=Reaches(attention=rates.pop("attention"), computing=measured.computing),
        **rates,
    )


# --- least squares


def fit(ops: Mapping[Op, float]) -> dict[str, Any]:
    """Fit `flops` by dtype, `bandwidth`, `launch`, `ops` and attention's share of flops to the seconds of ops."""
    plain = [(op, seconds) for op, seconds in ops.items() if not op.attention]
    dtypes = sorted({format_of(op.dtype) for op, _ in plain if op.flops})
    copies = [(op, seconds) for op, seconds in plain if op.name in COPIES]
    launch, traffic = _positive_least_squares([[1.0, op.traffic] for op, _ in copies], [s for _, s in copies])
    flops = {}
    for dtype in dtypes:
        products = [(op, s) for op, s in plain if op.flops and format_of(op.dtype) == dtype]
        large = statistics.median(op.flops for op, _ in products)
        rest = [(op.flops, max(s - launch - op.traffic * traffic, 0.1 * s)) for op, s in products if op.flops >= large]
        (per_flop,) = _positive_least_squares([[x] for x, _ in rest], [s for _, s in rest])
        flops[dtype] = 1 / per_flop
    rates: dict[str, Any] = {"flops": flops, "bandwidth": 1 / traffic, "launch": launch}
    device = Device(name="", memory=1, kind="cpu", within=_NO_LINK, between=_NO_LINK, **rates)
    kernels: defaultdict[str, list[tuple[Op, float]]] = defaultdict(list)
    for op, seconds in ops.items():
        if op.attention:
            kernels[op.name if op.dtype == "float32" else f"{op.name} {op.dtype}"].append((op, seconds))
    shares = {name: _share(device, some) for name, some in kernels.items()}
    by: defaultdict[str, list[float]] = defaultdict(list)
    for op, seconds in plain:
        by[op.name].append(seconds / device.op_seconds(op))
    by_op: dict[str, OpRates] = {}
    for name, ratios in sorted(by.items()):
        if abs((ratio := statistics.median(ratios)) - 1) > OWN:
            rate = 1 / ratio if any(op.flops for op, _ in plain if op.name == name) else None
            by_op[name] = OpRates(launch=launch * ratio, bandwidth=1 / traffic / ratio, flops=rate)
    attention = min(statistics.median(shares.values()), 1.0) if shares else None
    for name, share in shares.items():  # each kernel and dtype reaches another share; the median is of unknown kernels
        least = min(seconds for _, seconds in kernels[name])
        by_op[name] = OpRates(launch=least, flops=share / (attention or 1.0))
    return {**rates, "ops": by_op, "attention": attention}


def _share(device: Device, kernel: Sequence[tuple[Op, float]]) -> float:
    """Return the share of a dtype's flops that an attention kernel's large calls reach."""
    large = max(op.flops for op, _ in kernel) / LARGE
    rates = [op.computed() / device.flops_per_second(op.dtype) / s for op, s in kernel if op.flops > large]
    return statistics.median(rates)


def fit_link(messages: Mapping[Message, float]) -> Link:
    """Fit a node's link to the seconds of collectives: each takes its latency plus its bytes over its rate.

    Each kind then gets its share of the rate that the fastest kind reaches.
    """

    def seconds(kind: str, nbytes: float, count: int, link: Link) -> float:
        device = Device(name="", memory=1, flops={"float32": 1}, bandwidth=1, node=count, within=link, between=link)
        return collective_seconds(device, kind, nbytes, tuple(range(count)))

    unit_latency, unit_rate = Link(bandwidth=1e30, latency=1.0), Link(bandwidth=1.0, latency=0.0)
    columns = [[seconds(*x, unit_latency), seconds(*x, unit_rate)] for x in messages]
    latency, per_byte = _positive_least_squares(columns, list(messages.values()))
    link = Link(bandwidth=1 / per_byte, latency=latency)
    by: defaultdict[str, list[float]] = defaultdict(list)
    for x, took in messages.items():
        if x[1] >= 2**20:
            by[x[0]].append(seconds(*x, link) / took)
    reached = {kind: statistics.median(factors) for kind, factors in by.items()}
    most = max(reached.values(), default=1.0)
    kinds = {kind: share / most for kind, share in sorted(reached.items()) if share < (1 - OWN) * most}
    return link.model_copy(update={"bandwidth": most / per_byte, "kinds": kinds})


def _positive_least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return factors of columns that add up to the seconds, with least relative errors, all above 0."""
    took = np.array(seconds)
    table = np.array(columns) / took[:, None]
    scale = np.maximum(np.abs(table).max(0), 1e-300)
    table, left = table / scale, list(range(table.shape[1]))
    factors = np.full(table.shape[1], 1e-9)
    while left:
        solution = np.linalg.lstsq(table[:, left], np.ones(len(took)), rcond=None)[0]
        if (solution > 0).all():
            factors[left] = solution
            break
        left = [i for i, x in zip(left, solution, strict=True) if x > 0]
    return [float(x) for x in factors / scale]


# --- ops


def _ops(device: torch.device, sizes: Sequence[tuple[int, int]], rounds: int) -> tuple[dict[Op, float], float]:
    """Return the seconds of the ops of all pieces, and `host`.

    All pieces run in turn, several times, so that operands are as in a step: seldom in the nearest cache.
    """
    if device.type == "cpu":
        keep_freed()  # as in a run
    pieces = [
        piece
        for dtype in (torch.float32, torch.bfloat16)
        for tokens, hidden in sizes
        for piece in _pieces(tokens, hidden, device, dtype)
    ]
    took: defaultdict[Op, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        with OpTimes(device) as times:
            for piece in pieces:
                piece()
        for x in times.measured(0).ops if turn else ():  # the first round allocates
            took[x.op._replace(of="", again=False)].append(x.seconds / x.count)
    return {op: statistics.median(runs) for op, runs in took.items() if min(runs) > 0}, _host(device, sizes[0])


def _pieces(tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Yield functions that each run one piece, forward and backward."""
    random = partial(torch.randn, dtype=dtype, device=device)
    x, wide = random(tokens, hidden).requires_grad_(), random(tokens, 4 * hidden).requires_grad_()
    linear = partial(nn.Linear, device=device, dtype=dtype)
    up, down, norm = linear(hidden, 4 * hidden), linear(4 * hidden, hidden, bias=False), nn.LayerNorm(hidden)
    norm = norm.to(device, dtype)
    q = random(max(tokens // LENGTH, 1), max(hidden // HEAD, 1), min(tokens, LENGTH), HEAD).requires_grad_()
    ids = torch.arange(tokens, device=device) % VOCABULARY
    table, logits = random(VOCABULARY, hidden).requires_grad_(), random(tokens, VOCABULARY).requires_grad_()
    yield lambda: _backward(up(x))
    yield lambda: _backward(down(wide))
    yield lambda: _backward(functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    if tokens >= (long := LONG[device.type]):
        w = random(tokens // long, max(hidden // 64, 1), long, 64).requires_grad_()
        yield lambda: _backward(functional.scaled_dot_product_attention(w, w, w, is_causal=True))
    yield lambda: _backward((q @ q.transpose(-1, -2)).softmax(-1) @ q)
    yield lambda: _backward(norm(x))
    yield lambda: _backward(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    for function in (functional.gelu, functional.silu, functional.relu, torch.tanh, torch.sigmoid, torch.exp):
        yield lambda function=function: _backward(function(wide))  # type: ignore[misc]
    yield lambda: _backward((x + x * 0.5) * x / 3 - x)
    yield lambda: _backward(x.view(tokens, -1, 8).transpose(0, 1).contiguous())
    yield lambda: _backward(torch.where(x > 0, x, -x) + x.clone())
    yield lambda: _backward(functional.embedding(ids, table))
    yield lambda: _backward(functional.cross_entropy(logits, ids))
    weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in ((hidden, hidden), (hidden,))]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, foreach=False)

    def update() -> None:
        for w in weights:
            w.grad = w.detach().clone()
        optimizer.step()

    if dtype == torch.float32:
        yield update


def _backward(result: Tensor) -> None:
    """Run backward from a result, with a gradient that is stored in memory."""
    torch.autograd.backward([result], [result.detach()])


def _host(device: torch.device, size: tuple[int, int]) -> float:
    """Return the seconds per op that a small model's step takes beside its ops.

    On a GPU: all its seconds, as such a step waits only for the host.
    """
    tokens, hidden = size
    x = torch.randn(tokens, hidden, device=device)
    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        for _ in range(LAYERS)
    ).to(device)

    def step() -> None:
        y = x
        for layer in layers:
            y = y + layer(y)
        _backward(y)

    step()
    least = min(_seconds(step, device) for _ in range(ROUNDS))
    with OpTimes(device) as times:
        step()
    timed = times.measured(0).ops
    count = sum(op.count for op in timed)
    spent = sum(op.count * op.least for op in timed) if device.type == "cpu" else 0.0
    return max(least - spent, 0.0) / count


# --- collectives


def _in_processes(backend: str, threads: int, count: int) -> Measured:
    """Start `count` processes that measure at the same time; return the results of the first."""
    settings = {name: globals()[name] for name in ("MESSAGES", "CALLS", "ROUNDS", "OP_ROUNDS", "BESIDE", "SIZES")}
    with (
        tempfile.TemporaryDirectory(prefix="shardc-links-") as folder,
        ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool,
    ):
        work = partial(_process, count=count, backend=backend, threads=threads, folder=folder, settings=settings)
        first, *_ = pool.map(work, range(count))
        return first


def _process(rank: int, count: int, backend: str, threads: int, folder: str, settings: dict[str, Any]) -> Measured:
    """Measure in one of the processes. settings: this file's, which a test may have changed."""
    globals().update(settings)
    torch.set_num_threads(threads)
    if backend == "gloo":
        own_cores.pin_process(rank, count)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    ops, host = _ops(device, SIZES["cpu"], OP_ROUNDS) if device.type == "cpu" else ({}, 0.0)
    dist.barrier()
    mesh = TorchMesh(Mesh((("ranks", count),)), device=device, watch=0)
    links, computing = _links(mesh, device), _overlapped_rate(mesh, device)
    dist.destroy_process_group()
    return Measured(ops, host, links, computing)


def _links(mesh: TorchMesh, device: torch.device) -> dict[Message, float]:
    """Time each kind and size of collective, in turn: a short slowdown then affects one round of several."""
    count = mesh.layout.world
    took: defaultdict[Message, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for nbytes in MESSAGES:
            x = torch.zeros(count, nbytes // (4 * count), device=device)
            ways: dict[str, Callable[[], Any]] = {
                "all_reduce": partial(mesh.all_reduce, x, ("ranks",)),
                "all_gather": partial(_gathered, mesh, x),
                "reduce_scatter": partial(mesh.reduce_scatter, x, "ranks"),
                "all_to_all": partial(mesh.all_to_all, x, "ranks"),
            }
            calls = max(min(CALLS, 2**24 // nbytes), 1)
            for kind in KINDS:
                dist.barrier()
                took[kind, nbytes, count].append(_seconds(ways[kind], device, calls))
    return {message: min(seconds) for message, seconds in took.items()}


def _gathered(mesh: TorchMesh, x: Tensor) -> None:
    """Gather into the tensor that already has this rank's part, as ZeRO does. x: [ranks, numbers of each]."""
    mesh.start_all_gather(x[mesh.rank], x.view(-1), "ranks").wait()


def _copies(device: torch.device) -> dict[Message, float]:
    """Return the seconds of copies from the host to the only GPU, instead of messages."""
    host = torch.zeros(MESSAGES[-1], dtype=torch.uint8, pin_memory=True)
    gpu = torch.zeros_like(host, device=device)
    return {
        ("send_recv", n, 2): min(_seconds(partial(gpu[:n].copy_, host[:n]), device) for _ in range(ROUNDS))
        for n in MESSAGES
    }


def _overlapped_rate(mesh: TorchMesh, device: torch.device) -> float:
    """Return the share of its rate at which a device computes beside collectives.

    If collectives take a seconds alone, ops b, and both together c, then a + b - c seconds' worth of ops ran in the a.
    """
    n, ranks = PRODUCT[device.type], mesh.layout.world
    weight, x = torch.ones(n, n, device=device), torch.ones(n, n, device=device)
    whole = torch.ones(max(BESIDE // 4 // ranks, 1) * ranks, device=device)

    def step(collectives: int, products: int) -> None:
        works: list[Work] = [mesh.start_all_reduce(whole, ("ranks",)) for _ in range(collectives)]
        for _ in range(products):
            torch.mm(weight, x)
        for work in works:
            work.wait()

    def seconds(collectives: int, products: int) -> float:
        dist.barrier()
        return statistics.median(_seconds(partial(step, collectives, products), device, 3) for _ in range(ROUNDS))

    alone = seconds(BUCKETS, 0)
    products = math.ceil(2 * alone / max(seconds(0, 10) / 10, 1e-9))
    # both ranks must run the same number
    agreed = torch.tensor([float(products)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    products = int(agreed)
    share = (alone + seconds(0, products) - seconds(BUCKETS, products)) / alone
    return min(max(share, 0.05), 1.0)


def _seconds(call: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Return the mean seconds of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


# --- the machine


def _memory(device: torch.device) -> float:
    """Return the bytes of a GPU, or of the machine's memory that this process may use."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return float(total)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _name(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(names, platform.processor() or platform.machine())
    return f"{model}, {threads} thread{'s' if threads > 1 else ''} a process"
