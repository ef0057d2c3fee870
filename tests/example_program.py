"""A small program written by hand, as the compiler would write it: two linear layers, split as Megatron does, on dp x
tp.

h = gelu(linear(x, up.weight, up.bias))      column: rows of `up` on tp
z = linear(dropout(h), down.weight)          row: a partial sum over tp
loss = sum((z * scale - y)^2) / count        scale is also known as `tied.scale`; the batch is on dp
running' = 0.9 running + 0.1 mean(z)         a buffer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.api import Program
from shardc.ir.graph import copy_graph
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL_GRAD, Layout, Placement, Shard
from shardc.ir.stage import Stage
from shardc.ir.stored import Bucket, Buffer, Input, Param
from shardc.passes.joint import with_joint_graphs
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.rng import Rng
from shardc.spec import Spec
from shardc.spec.step_sections import Execution

B, K, H, N = 8, 6, 12, 4
aten = torch.ops.aten


class Model(nn.Module):
    """What `program` was compiled from."""

    running: Tensor

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(K, H, dtype=dtype), nn.Linear(H, N, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(N, dtype=dtype))
        self.tied = nn.Module()
        self.tied.register_parameter("scale", self.scale)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("running", torch.zeros(N, dtype=dtype))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.down(nn.functional.gelu(self.up(x)))
        if self.training:
            self.running = (0.9 * self.running + 0.1 * z.mean(0)).detach()
        return ((z * self.scale - y) ** 2).mean()


def batch(dtype: torch.dtype = torch.float64, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(B, K, generator=g, dtype=torch.float64).to(dtype),
        "y": torch.randn(B, N, generator=g, dtype=torch.float64).to(dtype),
    }


def program(dp: int = 1, tp: int = 1, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Program:
    mesh = Mesh((("dp", dp), ("tp", tp)))

    def lay(**placements: Placement) -> Layout:
        return Layout.of(placements, mesh)

    params = (
        Param(
            "up_weight",
            "up.weight",
            (H, K),
            dtype,
            layout=lay(dp=PARTIAL_GRAD, tp=Shard(0)),
            reduce=("dp",),
            order=3,
            bucket=1,
        ),
        Param(
            "up_bias",
            "up.bias",
            (H,),
            dtype,
            layout=lay(dp=PARTIAL_GRAD, tp=Shard(0)),
            reduce=("dp",),
            order=2,
            bucket=1,
        ),
        Param(
            "down_weight",
            "down.weight",
            (N, H),
            dtype,
            layout=lay(dp=PARTIAL_GRAD, tp=Shard(1)),
            reduce=("dp",),
            order=1,
            bucket=0,
        ),
        Param(
            "scale",
            "scale",
            (N,),
            dtype,
            aliases=("tied.scale",),
            layout=lay(dp=PARTIAL_GRAD),
            reduce=("dp",),
            order=0,
            bucket=0,
        ),
        Param("unused", "unused", (3,), dtype, order=4),
    )
    buffers = (
        Buffer("running", "running", (N,), dtype, updated=True),
        Buffer("count", "", (), dtype, persistent=False, constant=torch.tensor(float(B * N), dtype=dtype)),
    )
    inputs = (Input("x", ("x",), (B, K), dtype, lay(dp=Shard(0))), Input("y", ("y",), (B, N), dtype, lay(dp=Shard(0))))
    graph = fx.Graph()
    given: dict[str, Any] = {n: graph.placeholder(n) for n in ("mesh", "rng")}
    given |= {x.name: graph.placeholder(x.name) for xs in (params, buffers, inputs) for x in xs}

    def call(name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.create_node("call_function", target, args, kwargs, name=name)

    def total(name: str, x: fx.Node, axis: str, nbytes: int) -> fx.Node:
        node = call(name, ops.all_reduce, x, given["mesh"], (axis,), tag=name)
        node.meta["collective"] = Collective("all_reduce", "none", (axis,), nbytes, f"by hand: {name}")
        return node

    digits = ((0, "dp", 1, ()), (1, "tp", 1, ()))
    h = call("h", aten.gelu.default, call("up", aten.linear.default, given["x"], given["up_weight"], given["up_bias"]))
    d = call("d", ops.dropout, h, dropout, given["rng"], 0, given["mesh"], (B, H), digits)
    z = total("z_sum", call("z", aten.linear.default, d, given["down_weight"]), "tp", B // dp * N * dtype.itemsize)
    e = call("e", aten.sub.Tensor, call("zs", aten.mul.Tensor, z, given["scale"]), given["y"])
    s = total("s_sum", call("s", aten.sum.default, call("sq", aten.pow.Tensor_Scalar, e, 2)), "dp", dtype.itemsize)
    loss = call("loss", aten.div.Tensor, s, given["count"])
    loss.meta["value"] = Value((), dtype, True, lay())
    m = total(
        "m_sum",
        call("m", ops.partial_mean, call("cut", aten.detach.default, z), [0], False, B),
        "dp",
        N * dtype.itemsize,
    )
    old, part = call("old", aten.mul.Tensor, given["running"], 0.9), call("part", aten.mul.Tensor, m, 0.1)
    graph.output((loss, (call("new", aten.add.Tensor, old, part),)))
    buckets = (Bucket(("dp",), dtype, ("scale", "down_weight")), Bucket(("dp",), dtype, ("up_bias", "up_weight")))
    spec = Spec.load({"shardc": 1, "mesh": dict(mesh.axes)})
    made = Program(mesh, graph, params, buffers, inputs, (Stage(graph),), buckets, spec=spec)
    stored = (*params, *buffers, *inputs)
    for x in stored:
        given[x.name].meta["value"] = x.value

    def typed(rank: LoopbackMesh) -> None:
        local = [torch.zeros(x.value.local_shape(mesh), dtype=x.dtype) for x in stored]
        _Typed(graph if rank.rank == 0 else copy_graph(graph)).run(rank, Rng(), *local)

    loopback(mesh, typed)
    return with_joint_graphs(made, Execution())


class _Typed(fx.Interpreter):
    """Write the type of each result on one rank to its node."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(nn.Module(), graph=graph)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and "value" not in n.meta:
            grad = n.target is not aten.detach.default and any(
                x.meta["value"].requires_grad for x in n.all_input_nodes if "value" in x.meta
            )
            n.meta["value"] = Value(tuple(result.shape), result.dtype, grad)
        return result


def reference(steps: int = 1, **optimizer: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, state) of one device after so many AdamW steps on the same batch; gradients and loss of the
    last one.
    """
    model = Model()
    made = torch.optim.AdamW(model.parameters(), **optimizer)
    for _ in range(steps):
        made.zero_grad()
        loss = model(**batch())
        loss.backward()
        made.step()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model.state_dict()
