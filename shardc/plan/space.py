"""Enumerate what a plan searches: each point is a `Choice`, which can be written as a spec.

mesh         pp × dp × cp × ep × tp, outermost first: neighbours in tp share a node
the rest     sequence parallel, ZeRO, recomputation, the schedule, rows of a microbatch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shardc.passes.annotate.indivisible import divisors
from shardc.runtime.schedule import SCHEDULES

Keep = Literal["none", "cheap", "products", "selective", "sent", "half", "quarter", "eighth", "full", "host"]
#: Recomputation, from nothing to everything, as an entry of `checkpoint:` without `match`.
CHECKPOINTS: dict[Keep, dict[str, Any] | None] = {
    "none": None,
    "cheap": {"recompute": "cheap"},
    "products": {"recompute": ["elementwise", "norm", "gather", "attention", "matmul"]},
    "selective": {"save": ["linear", "attention", "collective"]},
    "sent": {"save": ["linear", "attention"]},
    "half": {"budget": 0.5},
    "quarter": {"budget": 0.25},
    "eighth": {"budget": 0.125},
    "full": {"save": []},
    "host": {"save": [], "offload": "cpu"},
}
#: What `data: {offload: ...}` keeps in host memory. Tried only if nothing else fits, as its copies have no price.
Offload = Literal["", "optimizer", "all"]
OFFLOADS: dict[Offload, dict[str, str]] = {
    "": {},
    "optimizer": {"optimizer": "cpu"},
    "all": {"optimizer": "cpu", "parameters": "cpu"},
}

#: Recomputation to try if some choice does not fit without; `host` only if nothing else fits.
KEEPS: tuple[Keep, ...] = tuple(k for k in CHECKPOINTS if k not in ("none", "host"))


def budget(keep: Keep) -> float | None:
    """Return the share of a region's bytes that is kept for backward; None if the entry has no budget."""
    entry = CHECKPOINTS[keep] or {}
    return entry.get("budget")


def casts_kept(keep: Keep) -> float:
    """Return the share of weights whose compute-dtype copy is kept for backward, not made again.

    0 if only named results are saved; with a budget, its share; otherwise 1.
    """
    share = budget(keep)
    return share if share is not None else 0.0 if "save" in (CHECKPOINTS[keep] or {}) else 1.0


@dataclass(frozen=True)
class Layers:
    """The list of repeated layers `name` ("model.layers"): `first` layers, then a pattern of `period`."""

    name: str
    number: int
    first: int = 0
    period: int = 1


class Core(NamedTuple):
    """A split: what decides the work of a rank for one row of one layer."""

    tp: int = 1
    ep: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    checkpoint: Keep = "none"


@dataclass(frozen=True)
class Choice:
    """One way to train. rows: of a microbatch, on one rank. per_rank: stages on each rank of a pipeline.

    outer: number of replica groups of the dp ranks; ZeRO shards inside a group. kept: at ZeRO 3, parameters stay whole
    during a step. over_experts: other weights are sharded over the experts' axis and replicated over dp; experts are
    sharded over dp. inside: neighbours in the pipeline share nodes, not those in dp. encoder_rows: an encoder splits
    its rows over tp, too. compiled: element-wise work of layers is compiled.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    checkpoint: Keep = "none"
    schedule: str = "1f1b"
    per_rank: int = 1
    rows: int = 1
    microbatches: int = 1
    outer: int = 1
    kept: bool = False
    over_experts: bool = False
    inside: bool = False
    offload: Offload = ""
    encoder_rows: bool = False
    compiled: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        data = {"dp_outer": self.outer, "dp": self.dp // self.outer, "cp": self.cp, "ep": self.ep}
        stages = {"pp": self.pp}
        sizes = {**data, **stages, "tp": self.tp} if self.inside else {**stages, **data, "tp": self.tp}
        return {a: n for a, n in sizes.items() if n > 1} or {"dp": 1}

    @property
    def encoder_mesh(self) -> dict[str, int]:
        """The mesh of an encoder whose rows all ranks of a stage split."""
        kept = {a: n for a, n in self.mesh.items() if a in ("dp_outer", "ep")}
        return {**kept, "dp": self.dp // self.outer * self.cp * self.tp}

    @property
    def batch(self) -> int:
        """Rows of the global batch."""
        return self.dp * self.ep * self.rows * self.microbatches

    @property
    def sharding(self) -> str:
        """The axis that ZeRO shards over: the experts' with `over_experts`, else dp, or cp if there is no dp."""
        if self.over_experts:
            return "ep"
        return "cp" if self.dp == 1 and self.cp > 1 else "dp"

    @property
    def data(self) -> dict[str, Any]:
        """The section `data:`; {} if it is not needed."""
        section: dict[str, Any] = {}
        if self.zero and self.sharded > 1:
            axis: Any = ["dp_outer", "dp"] if self.outer > 1 else self.sharding
            if self.over_experts and self.dp > 1:
                axis = ["dp", "ep"]
            section = {"axis": axis, "zero": self.zero, **({"keep": True} if self.kept else {})}
        return section | ({"offload": OFFLOADS[self.offload]} if self.offload else {})

    @property
    def sharded(self) -> int:
        """The number of ranks that ZeRO shards weights over, other than experts."""
        if self.over_experts:
            return self.ep
        return self.cp if self.dp == 1 else self.dp // self.outer

    @property
    def core(self) -> Core:
        return Core(self.tp, self.ep, self.cp, self.sequence_parallel, self.checkpoint)

    def __str__(self) -> str:
        said = [f"{a}={n}" for a, n in self.mesh.items()]
        said += ["sp"] if self.sequence_parallel else []
        over = " over ep" if self.over_experts else ""
        said += [f"zero {self.zero}{over}{', kept' if self.kept else ''}"] if self.sharded > 1 else []
        said += [f"offload {self.offload}"] if self.offload else []
        said += [self.schedule + (f" ×{self.per_rank}" if self.per_rank > 1 else "")] if self.pp > 1 else []
        said += ["encoder's rows over tp"] if self.encoder_rows else []
        said += ["compiled"] if self.compiled else []
        return ", ".join([*said, f"recompute {self.checkpoint}", f"{self.microbatches} microbatches of {self.rows}"])


@dataclass(frozen=True)
class Facts:
    """Facts of the model and the example batch that the choices and their specs need.

    Batch: rows; sequence: the size of its inputs' common sequence dim, None without one; tokens: of a row
    (Program.tokens); inputs: `batch: {dims: ...}`.
    Model: layers: its list of repeated layers, if long enough to shorten; dtype: of its weights, "float32"; number: of
    experts; cuts: most stages of a pipeline.
    Sections of specs: shard, if tp > 1; precision. Patterns of modules: regions, of recomputation; sequences, whose
    results may be split by sequence; experts; encoders, whose layers run before the last list of layers.
    """

    rows: int
    sequence: int | None
    tokens: int | None
    inputs: Mapping[str, int | None]
    layers: Layers | None
    dtype: str
    number: int
    cuts: int
    shard: Mapping[str, Any]
    regions: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()
    precision: Mapping[str, Any] = field(default_factory=dict)


def spec(choice: Choice, facts: Facts, counts: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return a choice as a spec. counts: layers of each stage."""
    c, how, sizes = choice, CHECKPOINTS[choice.checkpoint], {"microbatches": choice.microbatches}
    parts = c.encoder_mesh if c.encoder_rows and c.tp > 1 else {}
    number = {"balance": list(counts)} if counts else {"stages": c.pp * c.per_rank}
    document: dict[str, Any] = {
        "shardc": 1,
        "mesh": {"dp": 1, **c.mesh} if parts and "dp" not in c.mesh else c.mesh,
        "parts": {name: {"modules": name, "mesh": parts} for name in facts.encoders} if parts else {},
        "batch": ({"dims": dict(facts.inputs)} if facts.inputs else {}) | (sizes if c.microbatches > 1 else {}),
        "sequence": {"axis": "cp"} if c.cp > 1 else {},
        "shard": dict(facts.shard) if c.tp > 1 else {},
        "activations": {name: {1: "tp"} for name in facts.sequences if c.sequence_parallel},
        "execution": {"compile": "layers"} if c.compiled else {},
        "pipeline": {"axis": "pp", **number, "schedule": c.schedule} if c.pp > 1 else {},
        "data": c.data,
        "experts": [{"match": name, "axis": "ep"} for name in facts.experts if c.ep > 1],
        "checkpoint": [{"match": name, **how} for name in facts.regions] if how is not None else [],
        "precision": dict(facts.precision),
    }
    return {name: section for name, section in document.items() if section}


def tensor_widths(devices: int, node: int) -> tuple[list[int], list[int]]:
    """Return sizes of the tensor-parallel axis: those inside a node, and those of 2 to 4 whole nodes.

    The latter are slow: they are tried only if nothing of the first kind fits into memory. node: devices of a node.

    >>> tensor_widths(24, 8)
    ([1, 2, 4, 8], [24])
    """
    inside = [t for t in divisors(devices) if t <= node and (node % t == 0 or devices <= node)]
    return inside, [t for t in divisors(devices) if t in range(2 * node, 4 * node + 1, node)]


#: A microbatch of more rows is tried only if it holds all rows of a rank.
ROWS = 64
#: The fewest tokens of a row on a rank of the sequence axis: with fewer, it soon sends more than it computes.
TOKENS = 1024


def sequence_widths(ranks: int, tokens: int | None) -> list[int]:
    """Return sizes of the sequence axis with two equal stretches for each rank (a zigzag), ascending.

    >>> sequence_widths(12, 8192)
    [2, 4]
    """
    return [c for c in divisors(ranks) if c > 1 and tokens and tokens % (2 * c) == 0 and tokens // c >= TOKENS]


def splits(facts: Facts, devices: int, node: int, *, over_nodes: bool = False) -> list[Core]:
    """Return the splits of so many devices without recomputation, also those that compile refuses.

    Tensor parallelism is inside a node, or with `over_nodes` over several nodes.
    """
    return [
        Core(tp, ep, sequence_parallel=tp > 1 and bool(facts.sequences))
        for tp in tensor_widths(devices, node)[over_nodes]
        for ep in (divisors(facts.number) if facts.number else [1])
        if devices % (tp * ep) == 0
    ]


def longer(facts: Facts, devices: int, node: int) -> list[Core]:
    """Return the splits with each number of ranks that can cut the sequence."""
    return [
        core._replace(cp=cp)
        for core in splits(facts, devices, node)
        for cp in sequence_widths(devices // (core.tp * core.ep), facts.sequence)
    ]


def _with(c: Choice, **changes: Any) -> Choice:
    """Return a changed copy, five times faster than dataclasses.replace: there are 100,000s of choices."""
    made = object.__new__(Choice)
    made.__dict__.update(c.__dict__, **changes)
    return made


def choices(core: Core, devices: int, batch: int, layers: int, most: int = 1 << 30, node: int = 1) -> Iterator[Choice]:
    """Yield all choices for so many devices and rows, with this core.

    layers: most stages of a pipeline; most: microbatches that the model can take; node: devices of a node.
    """
    tp, ep, cp, sp, keep = core
    if devices % (tp * ep * cp):
        return
    for pp in (d for d in divisors(devices // (tp * ep * cp)) if d <= layers):
        dp = devices // (tp * ep * cp * pp)
        if batch % (dp * ep):
            continue
        each = batch // (dp * ep)
        base = Choice(pp, dp, cp, ep, tp, sp, checkpoint=keep)
        # stages are in different nodes, or if possible share them
        shared = (False, True) if pp > 1 and dp > 1 and tp * cp * ep < node < tp * cp * ep * pp * dp else (False,)
        for rows in (r for r in divisors(each) if (r & (r - 1) == 0 and r <= ROWS) or r == each):
            if each // rows > most or (rows > 1 and pp > 1 and each // rows < pp and each // pp > 0):
                continue  # too many for the model, or too few to fill the pipeline although fewer rows fill it
            for inside in shared:
                sized = _with(base, rows=rows, microbatches=each // rows, inside=inside)
                for sharded in sharding(sized, node):
                    yield from scheduled(sharded, layers)


def sharding(c: Choice, node: int) -> Iterator[Choice]:
    """Yield the choice with every level of ZeRO: over data ranks, inside a node, and over expert ranks."""
    near = node // (c.tp * c.cp * c.ep * (c.pp if c.inside else 1))
    over: list[dict[str, Any]] = [{}] if c.sharded > 1 else []
    over += [{"outer": c.dp // near}] if 1 < near < c.dp and c.dp % near == 0 else []
    over += [{"over_experts": True}] if c.ep > 1 else []
    yield c
    for zero in (1, 2, 3):
        for ranks in over:
            for kept in (False, True) if zero == 3 and c.microbatches > 1 else (False,):
                yield _with(c, zero=zero, kept=kept, **ranks)


def scheduled(c: Choice, layers: int) -> Iterator[Choice]:
    """Yield the choice with every schedule of a pipeline."""
    if c.pp == 1:
        yield c
        return
    for name, maker in SCHEDULES.items():
        if maker.splits_backward and (c.zero == 3 or c.checkpoint != "none"):
            # the second half of backward needs what the first one gathered or recomputed: this saves no memory
            continue
        for v in maker.per_rank:
            if c.pp * v <= layers:
                yield _with(c, schedule=name, per_rank=v)
