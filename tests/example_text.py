"""A typed program written by hand, text for text: two linear layers, split as Megatron does, on dp x tp, with sources
and causes.

pre = x * scale ;  h = gelu(linear(pre, up)) ;  z = linear(h, down) ;  loss = sum(z²) / 32 ;  mean' = mean of z over the
batch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardc.api import Program
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import Layout
from shardc.ir.source import Source
from shardc.ir.stage import Stage
from shardc.ir.stored import Bucket, Buffer, Input, Param
from shardc.ir.type_text import parse
from shardc.runtime import ops
from shardc.spec import Spec

MESH = Mesh((("dp", 2), ("tp", 2)))
aten = torch.ops.aten

ROOT = Source("", "mlp.py:12", "pre = x * self.scale")
UP = Source("up", "mlp.py:13", "h = gelu(self.up(pre))")
DOWN = Source("down", "mlp.py:14", "z = self.down(h)  # the block's output")
LOSS = Source("", "mlp.py:15", "return (z ** 2).mean()")
ROW = "mlp.yaml:5:3 'down': row"
BATCH = "mlp.yaml:3:3 batch dim 0 of 'x'"


def value(text: str) -> Value:
    bare = text.removesuffix(" grad")
    shape, dtype, placements = parse(bare)
    return Value(shape, dtype, bare != text, Layout.of(placements, MESH))


def _stored(text: str) -> dict[str, Any]:
    v = value(text)
    return {"shape": v.shape, "dtype": v.dtype, "layout": v.layout}


PARAMS = (
    Param("scale", "scale", **_stored("f64[6] ~dp"), aliases=("tied.scale",), reduce=("dp",), order=2, bucket=0),
    Param("up_weight", "up.weight", **_stored("f64[2·6@tp, 6] ~dp"), reduce=("dp",), order=1, bucket=0),
    Param("down_weight", "down.weight", **_stored("f64[4, 2·6@tp]"), requires_grad=False, order=0),
)
BUFFERS = (
    Buffer("mean", "mean", **_stored("f64[4]"), updated=True),
    Buffer("count", "", **_stored("f64[]"), persistent=False, constant=torch.tensor(32.0, dtype=torch.float64)),
)
INPUTS = (Input("x", ("x",), **_stored("f64[8@dp, 6]")),)

Call = Callable[..., fx.Node]


def _graph(body: Callable[[Call, dict[str, fx.Node]], Any], layouts: bool) -> fx.Graph:
    graph = fx.Graph()
    given = {n: graph.placeholder(n) for n in ("mesh", "rng")}
    for node in given.values():
        node.meta["value"] = None
    for x in (*PARAMS, *BUFFERS, *INPUTS):
        given[x.name] = node = graph.placeholder(x.name)
        node.meta["value"] = x.value if layouts else Value(x.shape, x.dtype, x.value.requires_grad)

    def call(
        name: str, source: Source, typed: str, target: Any, *args: Any, collective: Collective | None = None
    ) -> fx.Node:
        node = graph.create_node("call_function", target, args, {"tag": name} if collective else {}, name=name)
        node.meta = {"value": value(typed), "source": source} | ({"collective": collective} if collective else {})
        return node

    graph.output(body(call, given))
    return graph


def _single(call: Call, at: dict[str, fx.Node]) -> Any:
    pre = call("pre", ROOT, "f64[8, 6] grad", aten.mul.Tensor, at["x"], at["scale"])
    h = call(
        "h",
        UP,
        "f64[8, 12] grad",
        aten.gelu.default,
        call("up", UP, "f64[8, 12] grad", aten.linear.default, pre, at["up_weight"], None),
    )
    z = call("z", DOWN, "f64[8, 4] grad", aten.linear.default, h, at["down_weight"])
    s = call(
        "s", LOSS, "f64[] grad", aten.sum.default, call("square", LOSS, "f64[8, 4] grad", aten.pow.Tensor_Scalar, z, 2)
    )
    mean = call("new", DOWN, "f64[4]", aten.mean.dim, call("cut", DOWN, "f64[8, 4]", aten.detach.default, z), [0])
    return call("loss", LOSS, "f64[] grad", aten.div.Tensor, s, at["count"]), (mean,)


def _local(call: Call, at: dict[str, fx.Node]) -> Any:
    mesh = at["mesh"]
    pre = call("pre", ROOT, "f64[8@dp, 6] grad", aten.mul.Tensor, at["x"], at["scale"])
    varied = Collective("none", "all_reduce", ("tp",), 192, "mlp.yaml:4:3 'up': {0: tp/2}")
    pre = call("pre_each", UP, "f64[8@dp, 6] ~tp grad", ops.sum_grad, pre, mesh, ("tp",), collective=varied)
    up = call("up", UP, "f64[8@dp, 2·6@tp] grad", aten.linear.default, pre, at["up_weight"], None)
    h = call("h", UP, "f64[8@dp, 2·6@tp] grad", aten.gelu.default, up)
    z = call("z", DOWN, "f64[8@dp, 4] +tp grad", aten.linear.default, h, at["down_weight"])
    z = call(
        "z_sum",
        DOWN,
        "f64[8@dp, 4] grad",
        ops.all_reduce,
        z,
        mesh,
        ("tp",),
        collective=Collective("all_reduce", "none", ("tp",), 128, ROW),
    )
    s = call(
        "s",
        LOSS,
        "f64[] +dp grad",
        aten.sum.default,
        call("square", LOSS, "f64[8@dp, 4] grad", aten.pow.Tensor_Scalar, z, 2),
    )
    implied = Collective("all_reduce", "none", ("dp",), 8, BATCH)
    s = call("s_sum", LOSS, "f64[] grad", ops.all_reduce, s, mesh, ("dp",), collective=implied)
    mean = call(
        "part",
        DOWN,
        "f64[4] +dp",
        ops.partial_mean,
        call("cut", DOWN, "f64[8@dp, 4]", aten.detach.default, z),
        [0],
        False,
        8,
    )
    implicit = Collective("all_reduce", "none", ("dp",), 32, BATCH, implicit=True)
    mean = call("new", DOWN, "f64[4]", ops.all_reduce, mean, mesh, ("dp",), collective=implicit)
    return call("loss", LOSS, "f64[] grad", aten.div.Tensor, s, at["count"]), (mean,)


def program() -> Program:
    buckets = (Bucket(("dp",), torch.float64, ("up_weight", "scale")),)
    notes = ("new: all_reduce that no annotation implies",)
    return Program(
        MESH,
        _graph(_single, layouts=False),
        PARAMS,
        BUFFERS,
        INPUTS,
        (Stage(_graph(_local, layouts=True)),),
        buckets,
        spec=Spec.load({"shardc": 1, "mesh": dict(MESH.axes)}),
        notes=notes,
        meta={"model": "MLP"},
    )
