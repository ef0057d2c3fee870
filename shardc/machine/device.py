"""Define a device: its rates, its links to others, and the seconds of an op on it."""

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


#: Dtypes of 8-bit products (the factors' dtype, or that of block scales) and their names in a device's `flops`.
NARROW = {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float8_e8m0fnu": "mxfp8"}


def format_of(dtype: str) -> str:
    """Return the name of a dtype in a device's `flops`: "float32", "float8", "mxfp8"."""
    return NARROW.get(dtype, dtype)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Section):
    """A link of a device. bandwidth: bytes per second that one device sends while it receives as many.

    If several devices share a network card, bandwidth is one device's part. latency: seconds of a message; start:
    seconds once per collective, for its kernel and for ranks that wait for each other.

    reaches: the share of bandwidth that large collectives reach, if it is not the device's `reaches.link`. adds: the
    share that a sum in the link's switches reaches (NVLink SHARP); 0: they cannot sum. peer: bytes per second to any
    one other device, if that is less (separate links to each device of a node). kinds: a further
    factor for a kind of collective ("all_gather", ...), if it is not 1: libraries run some of them as copies.
    """

    bandwidth: Positive
    latency: Annotated[float, Field(ge=0)]
    start: Annotated[float, Field(ge=0)] = 0.0
    reaches: Share | None = None
    adds: Annotated[float, Field(ge=0, le=1)] = 0.0
    peer: Positive | None = None
    kinds: dict[str, Share] = {}


class Reaches(_Section):
    """The shares of a device's peaks that large ops reach. attention: of `flops`, for attention kernels.

    computing: of all rates, while a collective runs beside, whose kernels occupy a part of the device.
    """

    flops: Share = 1.0
    bandwidth: Share = 1.0
    link: Share = 1.0
    attention: Share | None = None
    computing: Share = 1.0


class Products(_Section):
    """The share of `flops` × `reaches.flops` that a product of [m, k] by [k, n] reaches, by its shape.

    A result is cut into tiles. `units` tiles are computed at once; the last round may have fewer, and tiles at the edge
    may be partial. Each tile takes `ramp` more k steps, for its start and end.

    tiles: (rows, columns, share of the peak) that libraries choose from. unaligned: for products in 16 bits or less,
    the share that they reach if their matrices' rows begin at multiples of only so many bytes. (NVIDIA, "Matrix
    Multiplication Background User's Guide": tile and wave quantization, alignment.)
    """

    tiles: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Share], ...]
    units: Annotated[int, Field(ge=1)] = 1
    ramp: Annotated[float, Field(ge=0)] = 0.0
    unaligned: Mapping[int, Share] = {}

    def share(self, m: int, n: int, k: float, many: int = 1, faster: float = 1.0) -> float:
        """Return the share of the peak that `many` products of this shape reach together.

        k is cut into parts if that keeps all units busy. faster: steps of k in the time of one that `ramp` counts.

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


#: Keys in one block of a CPU's attention kernel (torch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
CPU_KEYS = 512


class OpRates(_Section):
    """The rates of one torch op, if they differ from the device's. launch: its least seconds.

    bandwidth: bytes per second that it reads and writes; flops: share of what products of its shape reach.
    """

    launch: Annotated[float, Field(ge=0)] | None = None
    bandwidth: Positive | None = None
    flops: Positive | None = None


class Outside(_Section):
    """Bytes of device memory outside of torch's allocator. context: of a process and its kernels.

    workspace: of the library of products. communicator: buffers of each communicator of NCCL.
    """

    context: Annotated[float, Field(ge=0)] = 0.0
    workspace: Annotated[float, Field(ge=0)] = 0.0
    communicator: Annotated[float, Field(ge=0)] = 0.0


class Device(_Section):
    """A device. source: of the numbers. kind: a CPU draws random masks in blocks, a GPU as a whole.

    memory: bytes, as torch reports them; outside: bytes of it that hold no tensors.
    flops: per second of a matrix product, by dtype; float8: factors of 8 bits with one scale per row, or one for all;
    mxfp8: one scale per 32 elements of a row. 8-bit formats that are not listed run in 16 bits. bandwidth: bytes of
    memory read or written per second. launch: the least seconds of an op. host: the least seconds in which the host
    starts an op; the host may run ahead of the device. On a CPU, which is its own host, an op takes launch, host, the
    time of its products and the time of its bytes, all added up.
    reaches: shares of these peaks; products: the share by a product's shape; ops: by torch's name of the op, "mul",
    with the dtype if it is not float32, "mul bfloat16".
    host_link: bytes per second between device and host memory, in either direction; None: copies take no time.
    node: devices in a node; nodes: their number, None: as many as needed. within, between: links inside a node and
    between nodes. pod: devices in a pod, whose nodes reach each other at the full rate of `between`; beyond: the link
    to other pods.
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
        """Return the bytes that a process with this many communicators takes beside its tensors."""
        return self.outside.context + self.outside.workspace + self.outside.communicator * communicators

    def check_room(self, ranks: int, where: str = "device") -> None:
        """Raise ShardcError if there are more ranks than devices."""
        if self.nodes is None or ranks <= self.nodes * self.node:
            return
        machine = f"{plural(self.nodes, 'node')} of {plural(self.node, 'device')}"
        fault = f"{ranks:,} ranks have no room on {machine}, which are {self.nodes * self.node:,}"
        fix = f"make it at most {self.nodes * self.node:,} ranks, or write nodes: {-(-ranks // self.node)}"
        raise ShardcError(fault, where=where, fix=fix)

    def flops_per_second(self, dtype: str) -> float:
        """Return the peak of products in a dtype; if unlisted, bfloat16's for 8 bits, else the slowest listed."""
        slowest = min(self.flops.values())
        return self.flops.get(format_of(dtype), self.flops.get("bfloat16", slowest) if dtype in NARROW else slowest)

    def op_seconds(self, op: Op) -> float:
        """Return the seconds of an op: of its products or of its traffic, whichever takes longer.

        On a CPU they add up, as its libraries first copy a product's operands into another order.
        """
        launch, products, traffic = self.launch_seconds(op), self.product_seconds(op), self.traffic_seconds(op)
        if self.kind == "cpu":
            return launch + products + traffic
        return max(launch, products, traffic)

    def cause(self, op: Op) -> Literal["compute", "memory", "launch"]:
        """Return what takes most of an op's time: its products, its traffic, or its launch."""
        compute, traffic = self.product_seconds(op), self.traffic_seconds(op)
        if max(compute, traffic) < self.launch_seconds(op):
            return "launch"
        return "compute" if compute >= traffic else "memory"

    def launch_seconds(self, op: Op) -> float:
        """Return the least seconds of an op."""
        listed = self._op_rate(op, "launch")
        return self.launch if listed is None else listed

    def _op_rate(self, op: Op, what: Literal["launch", "bandwidth", "flops"]) -> float | None:
        """Return a rate from `ops` for the op in its dtype, or else for the op; None if there is none."""
        keys = (op.name,) if op.dtype in ("", "float32") else (f"{op.name} {op.dtype}", op.name)
        for key in keys if self.ops else ():
            if key in self.ops and (rate := getattr(self.ops[key], what)) is not None:
                return float(rate)
        return None

    def product_seconds(self, op: Op) -> float:
        """Return the seconds of an op's flops, without those that its kernel skips."""
        if not op.flops:
            return 0.0
        peak = self.flops_per_second(op.dtype)
        share = self._op_rate(op, "flops") or 1.0
        if op.attention:
            peak *= self.reaches.attention or self.reaches.flops
            return op.computed(self._left_out(op)) / (peak * share)
        if self.products is not None and op.matrices and min(op.matrices[1:]) > 1:  # a matrix by a vector has no tiles
            count, m, n = op.matrices
            # a ramp takes the same seconds in any dtype; 8 bits do more steps of k in them
            faster = peak / self.flops_per_second("bfloat16") if op.dtype in NARROW else 1.0
            share *= self.products.share(m, n, op.flops / (2 * count * m * n), count, faster)
            if op.dtype in ("bfloat16", "float16", *NARROW):
                share *= self.products.unaligned.get(op.aligned, 1.0)
        return op.flops / (peak * self.reaches.flops * share)

    def _left_out(self, op: Op) -> float:
        """Return the share of causally masked flops that a kernel skips; a CPU skips less, by larger blocks."""
        return max(1 - CPU_KEYS / op.matrices[2], 0.0) if self.kind == "cpu" and op.matrices else 1.0

    def traffic_seconds(self, op: Op) -> float:
        """Return the seconds of the bytes that an op reads and writes."""
        return op.traffic / (self._op_rate(op, "bandwidth") or self.bandwidth * self.reaches.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy between the device's memory and the host's."""
        return 0.0 if self.host_link is None else self.launch + nbytes / (self.host_link * self.reaches.link)

    def to_yaml(self) -> str:
        """Format the device as a file, with units in comments."""
        lines = []
        for name, value in self.model_dump(exclude_none=True, exclude_defaults=True, mode="json").items():
            text = _yaml(value)
            lines.append(f"{name}: {text}" + (f"   # {_UNITS[name]}" if name in _UNITS else ""))
        return "\n".join(lines) + "\n"


#: Comments on a device's fields, in its file.
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
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.4e}" if number and value and not 1e-3 <= abs(value) < 1e6 else json.dumps(value)
