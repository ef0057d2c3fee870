"""What a device does in a second, and how fast it reaches others; what an op takes of it. (device_file reads one.)"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardc.errors import ShardcError
from shardc.ir.units import plural
from shardc.machine.work import Op

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


#: Dtypes of products of 8 bits, and what a device's `flops` call them: by their factors', or by their scales' where
#: these are of blocks.
NARROW = {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float8_e8m0fnu": "mxfp8"}


def format_of(dtype: str) -> str:
    """What a device's `flops` call a dtype: "float32"."""
    return NARROW.get(dtype, dtype)


def own_rates(op: Op) -> str:
    """Under which name a device's `ops` have what an op reaches in its dtype."""
    return op.name if op.dtype in ("", "float32") else f"{op.name} {op.dtype}"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Section):
    """bandwidth: bytes per second that one device sends, while it receives as many: where several share a network card,
    its part. latency: seconds of a message; start: and, once, of a collective: its kernel, and ranks that wait for each
    other.

    reaches: the share of it that large collectives reach, where that is not the device's `reaches.link`. adds: the
    share that a sum reaches which the link's switches compute (NVLink SHARP); 0: they do not. peer: bytes per second to
    any one other device, where that is less: links that lead to each of a node's others. kinds: of a kind of collective
    ("all_gather", ...), the share of all this that it reaches, where that is not 1: libraries make some of them with
    copies.
    """

    bandwidth: Positive
    latency: Annotated[float, Field(ge=0)]
    start: Annotated[float, Field(ge=0)] = 0.0
    reaches: Share | None = None
    adds: Annotated[float, Field(ge=0, le=1)] = 0.0
    peer: Positive | None = None
    kinds: dict[str, Share] = {}


class Reaches(_Section):
    """The shares of a device's peaks that large ops reach. attention: of `flops`, that its kernels reach; computing: of
    all rates, while a collective runs beside, whose kernels take some of the device.
    """

    flops: Share = 1.0
    bandwidth: Share = 1.0
    link: Share = 1.0
    attention: Share | None = None
    computing: Share = 1.0


class Products(_Section):
    """What a product of [m, k] by [k, n] reaches of `flops` × `reaches.flops`, by its shape. A result is cut into
    tiles, of which `units` are computed at once: the last round may have fewer, and a tile at the edge be cut. Before
    and after a tile's k steps a unit takes as long as `ramp` more.

    tiles: (rows, columns, share of the peak) that libraries choose from. unaligned: of products in 16 bits or less,
    what they reach where rows of their matrices begin at multiples of so few bytes only. (NVIDIA, "Matrix
    Multiplication Background User's Guide": tile and wave quantization, alignment.)
    """

    tiles: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Share], ...]
    units: Annotated[int, Field(ge=1)] = 1
    ramp: Annotated[float, Field(ge=0)] = 0.0
    unaligned: Mapping[int, Share] = {}

    def share(self, m: int, n: int, k: float, many: int = 1, faster: float = 1.0) -> float:
        """Of the peak, that `many` products of this shape reach together; with k cut into parts where that gives all
        units work. faster: steps of k in the time of one that `ramp` counts.

        >>> Products(tiles=((128, 256, 1.0),), units=128).share(2048, 2048, 4096)
        1.0
        >>> Products(tiles=((128, 256, 1.0),), units=128).share(2048, 2176, 4096)    # 16 of 128 in a second round
        0.53125
        """
        least = math.inf
        for rows, columns, share in self.tiles:
            tiles = many * math.ceil(m / rows) * math.ceil(n / columns)
            for parts in (1, 2, 4, 8, 16):
                rounds = math.ceil(tiles * parts / self.units)
                least = min(least, rounds * rows * columns * (k / parts + self.ramp * faster) / share)
                if tiles * parts >= self.units:
                    break
        return many * m * n * k / (least * self.units)


#: Keys that a CPU's kernel of attention takes at once (torch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
CPU_KEYS = 512


class OpRates(_Section):
    """What one op of torch reaches where that is not the device's own. launch: seconds that it takes at least;
    bandwidth: bytes per second that it reads and writes; flops: share of what products of its shape reach. each: of a
    CPU, seconds beside all that for each of the products, or heads of a row, of which it computes several.
    """

    launch: Annotated[float, Field(ge=0)] | None = None
    bandwidth: Positive | None = None
    flops: Positive | None = None
    each: Annotated[float, Field(ge=0)] | None = None


class Outside(_Section):
    """Bytes of a device's memory that torch's allocator does not give: the context of a process, with the kernels that
    it loads; workspaces of the library of products; buffers of each communicator of NCCL.
    """

    context: Annotated[float, Field(ge=0)] = 0.0
    workspace: Annotated[float, Field(ge=0)] = 0.0
    communicator: Annotated[float, Field(ge=0)] = 0.0


class Device(_Section):
    """source: where the numbers are from. kind: a CPU makes masks in blocks, a GPU as a whole. memory: bytes,
    as torch shows them; outside: those of it that are no tensors'.

    flops: per second of a matrix product, by dtype; float8: of factors of 8 bits with one scale for each row, or one
    for all; mxfp8: with one for each 32 of a row. Those of 8 bits that are not listed run in 16. bandwidth: bytes of
    memory read or written per second. launch: the least seconds that an op takes. host: seconds in which the host
    starts one, at least; it may be ahead of the device. On a CPU, which is its own host, an op takes launch and host
    beside its work, and that of its products beside that of its bytes.
    reaches: shares of these peaks; products: what one of them reaches, by its shape; ops: by torch's name of the op,
    "mul", and of what is otherwise in another dtype than float32, "mul bfloat16".

    host_link: bytes per second between the device's memory and the host's, in either direction; None: copies take no
    time.
    node: devices in a node; nodes: how many there are, None: as many as it takes. within, between: links inside of a
    node and between nodes. pod: devices in a pod, whose nodes reach each other at the full rate of `between`; beyond:
    the link to other pods.
    """

    name: str
    source: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    memory: Positive
    outside: Outside = Outside()
    flops: Mapping[str, Positive]
    bandwidth: Positive
    launch: Annotated[float, Field(ge=0)] = 0.0
    host: Annotated[float, Field(ge=0)] = 0.0
    reaches: Reaches = Reaches()
    products: Products | None = None
    ops: Mapping[str, OpRates] = {}
    host_link: Positive | None = None
    node: Annotated[int, Field(ge=1)] = 1
    nodes: Annotated[int, Field(ge=1)] | None = None
    within: Link
    between: Link
    pod: Annotated[int, Field(ge=1)] | None = None
    beyond: Link | None = None

    @model_validator(mode="after")
    def _pods(self) -> Device:
        if (self.pod is None) != (self.beyond is None):
            raise ValueError("pod and beyond belong together: devices in a pod, and the link to other pods")
        if self.pod is not None and (self.pod % self.node or self.pod <= self.node):
            raise ValueError(f"a pod has several whole nodes of {self.node} devices, not {self.pod} devices")
        return self

    def outside_bytes(self, communicators: int) -> float:
        """Bytes that a process with so many communicators takes beside its tensors."""
        return self.outside.context + self.outside.workspace + self.outside.communicator * communicators

    def check_room(self, ranks: int, where: str = "device") -> None:
        """Raises ShardcError where so many ranks are more than there are devices."""
        if self.nodes is None or ranks <= self.nodes * self.node:
            return
        machine = f"{plural(self.nodes, 'node')} of {plural(self.node, 'device')}"
        fault = f"{ranks:,} ranks have no room on {machine}, which are {self.nodes * self.node:,}"
        fix = f"make it at most {self.nodes * self.node:,} ranks, or write nodes: {-(-ranks // self.node)}"
        raise ShardcError(fault, where=where, fix=fix)

    def flops_per_second(self, dtype: str) -> float:
        """The peak of products in a dtype, "bfloat16". Of one that is not listed, that of the slowest: but of factors
        of 8 bits, that of 16, in which they are multiplied where there is no kernel.
        """
        slowest = min(self.flops.values())
        return self.flops.get(format_of(dtype), self.flops.get("bfloat16", slowest) if dtype in NARROW else slowest)

    def op_seconds(self, op: Op) -> float:
        """Its flops or its memory traffic in bytes, whichever takes longer; on a CPU one after the other, as its
        libraries copy a product's operands into another order first.
        """
        launch, products, traffic = self.launch_seconds(op), self.product_seconds(op), self.traffic_seconds(op)
        if self.kind == "cpu":
            return launch + products + traffic + self.each_seconds(op)
        return max(launch, products, traffic)

    def cause(self, op: Op) -> Literal["compute", "memory", "launch"]:
        """What most of an op's time goes to: its products, its traffic, or to be run at all."""
        compute, traffic = self.product_seconds(op), self.traffic_seconds(op)
        if max(compute, traffic) < self.launch_seconds(op):
            return "launch"
        return "compute" if compute >= traffic else "memory"

    def launch_seconds(self, op: Op) -> float:
        """That it takes at least."""
        listed = self._own(op, "launch")
        return self.launch if listed is None else listed

    def each_seconds(self, op: Op) -> float:
        """That a CPU takes for each of an op's products beside their work."""
        return ((self._own(op, "each") or 0.0) * op.matrices[0]) if op.matrices else 0.0

    def _own(self, op: Op, what: Literal["launch", "bandwidth", "flops", "each"]) -> float | None:
        """What `ops` says of an op in its dtype, or else of the op."""
        for key in dict.fromkeys((own_rates(op), op.name)) if self.ops else ():
            if key in self.ops and (rate := getattr(self.ops[key], what)) is not None:
                return float(rate)
        return None

    def product_seconds(self, op: Op) -> float:
        """Of its flops, without those that its kernel leaves out."""
        if not op.flops:
            return 0.0
        peak = self.flops_per_second(op.dtype)
        share = self._own(op, "flops") or 1.0
        if op.attention:
            peak *= self.reaches.attention or self.reaches.flops
            return op.computed(self._left_out(op)) / (peak * share)
        if self.products is not None and op.matrices and min(op.matrices[1:]) > 1:  # a matrix by a vector has no tiles
            count, m, n = op.matrices
            # a ramp takes its seconds, in which 8 bits get further
            faster = peak / self.flops_per_second("bfloat16") if op.dtype in NARROW else 1.0
            share *= self.products.share(m, n, op.flops / (2 * count * m * n), count, faster)
            if op.dtype in ("bfloat16", "float16", *NARROW):
                share *= self.products.unaligned.get(op.aligned, 1.0)
        return op.flops / (peak * self.reaches.flops * share)

    def _left_out(self, op: Op) -> float:
        """Of the flops that a causal mask empties, the share that a kernel leaves out: a CPU's has large blocks."""
        return max(1 - CPU_KEYS / op.matrices[2], 0.0) if self.kind == "cpu" and op.matrices else 1.0

    def traffic_seconds(self, op: Op) -> float:
        """Of the bytes that it reads and writes."""
        return op.traffic / (self._own(op, "bandwidth") or self.bandwidth * self.reaches.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        """Of a copy between the device's memory and the host's."""
        return 0.0 if self.host_link is None else self.launch + nbytes / (self.host_link * self.reaches.link)

    def to_yaml(self) -> str:
        """The device as a file, with units in comments."""
        lines = []
        for name, value in self.model_dump(exclude_none=True, exclude_defaults=True, mode="json").items():
            text = _yaml(value)
            lines.append(f"{name}: {text}" + (f"   # {_UNITS[name]}" if name in _UNITS else ""))
        return "\n".join(lines) + "\n"


#: What a device's fields are, in its file.
_UNITS = {
    "memory": "bytes",
    "outside": "bytes of it, of the process, of libraries, of each communicator",
    "flops": "per second, of products of matrices",
    "bandwidth": "bytes of memory per second, read and written",
    "launch": "the least seconds of an op",
    "host": "seconds: the host starts no more ops than one in so many",
    "reaches": "shares of these peaks that large ops reach",
    "products": "tiles: rows, columns, share",
    "ops": "seconds; bytes per second; share of flops",
    "host_link": "bytes per second to the host's memory, or from it",
    "node": "devices in a node",
    "nodes": "how many there are",
    "within": "bytes per second and direction of one device; seconds",
    "pod": "devices in a pod",
}


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml(x)}" for k, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    large = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and not (1e-3 <= abs(value) < 1e6 or not value)
    )
    return f"{value:.4e}" if large else json.dumps(value)
