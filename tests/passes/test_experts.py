"""Experts: on any mesh as on one device, whatever the routing; what is sent is the chosen tokens; what does not fit is
said.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
import shardc.nn
from shardc.cli.ranks import step_lines
from shardc.runtime import launch, ops
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.ops.experts import activation as expert_activation
from shardc.runtime.ops.experts import grouped_mm as grouped_mm
from shardc.runtime.state.parts import gather
from shardc.runtime.step.expert_load import Load
from tests import equality, warm, zoo
from tests.zoo import hf

E, H, INNER, V = 8, 16, 12, 32


# --- models -----------------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """A router of top k over `shardc.nn.experts`, with a balancing loss and a z-loss. skew: added to one expert's
    logit.
    """

    def __init__(self, k: int = 1, skew: float = 0.0, activation: Any = "silu", balance: float = 0.1) -> None:
        super().__init__()
        self.k, self.skew, self.activation, self.balance = k, skew, activation, balance
        self.emb, self.router, self.head = nn.Embedding(V, H), nn.Linear(H, E, bias=False), nn.Linear(H, V)
        self.up, self.down = (
            nn.Parameter(torch.empty(E, INNER if activation == "relu" else 2 * INNER, H)),
            nn.Parameter(torch.empty(E, H, INNER)),
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(ids)
        logits = self.router(x) + self.skew * (torch.arange(E) == 3)
        p = logits.softmax(-1)
        weights, index = p.topk(self.k, -1)
        x = x + shardc.nn.experts(x, self.chosen(index), weights, self.up, self.down, activation=self.activation)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)
        if not self.balance:
            return loss
        share = F.one_hot(index[..., 0], E).to(p.dtype).mean((0, 1))
        return (
            loss
            + self.balance * E * (share * p.mean((0, 1))).sum()
            + 1e-2 * torch.logsumexp(logits, -1).square().mean()
        )

    def chosen(self, index: Tensor) -> Tensor:
        return index


class GShard(nn.Module):
    """Dispatch by einsum in groups, with a capacity (Lepikhin et al. 2020)."""

    def __init__(self, capacity: int = 4) -> None:
        super().__init__()
        self.emb, self.gate, self.head = nn.Embedding(V, H), nn.Linear(H, E, bias=False), nn.Linear(H, V)
        self.wi, self.wo, self.capacity = (
            nn.Parameter(torch.empty(E, H, INNER)),
            nn.Parameter(torch.empty(E, INNER, H)),
            capacity,
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(ids)
        p, index = self.gate(x).softmax(-1).max(-1)
        mask = F.one_hot(index, E).to(x.dtype)
        at = (mask.cumsum(1) - 1) * mask
        kept = mask * (at < self.capacity)
        dispatch = kept.unsqueeze(-1) * F.one_hot(at.long().clamp(0, self.capacity - 1), self.capacity).to(x.dtype)
        sent = torch.einsum("gsec,gsm->egcm", dispatch, x)
        made = torch.einsum("egci,eim->egcm", torch.relu(torch.einsum("egcm,emi->egci", sent, self.wi)), self.wo)
        x = x + torch.einsum("gsec,egcm->gsm", dispatch * p[..., None, None], made)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Loop(nn.Module):
    """A Python loop over experts. how: what each turn of it does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.emb, self.router, self.head = nn.Embedding(V, H), nn.Linear(H, E), nn.Linear(H, V)
        self.moe = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(ids).flatten(0, 1)
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        if self.how == "stack":
            w = torch.stack([e.weight for e in self.moe])  # type: ignore[misc]
            y = shardc.nn.experts(x, index, weights, w, w.mT, activation="relu") + self.moe[0](x)  # used twice
        for n, expert in enumerate(self.moe):
            if self.how == "rows":
                row, choice = torch.where(index == n)
                y = y.index_add(0, row, expert(x[row]) * weights[row, choice, None])
            elif self.how == "branch":
                mine = (index == n).any(-1)
                if mine.any():
                    y[mine] = y[mine] + expert(x[mine])
            elif self.how == "all":
                y = y + expert(x) * (weights * (index == n)).sum(-1, keepdim=True)
        return F.cross_entropy(self.head(x + y), targets.flatten(), ignore_index=-100)


def own(model: nn.Module) -> zoo.Built:
    return zoo.ready(model, torch.float64), {"ids": zoo.tokens(V), "targets": zoo.labels(V)}


def transformers(model: str, **config: Any) -> zoo.Built:
    common = {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    }
    return hf.build(hf.row(model, **hf.EXPERTS, **(common | {"num_hidden_layers": 1} | config)))


MODELS: dict[str, Callable[[], zoo.Built]] = {
    "mixtral": lambda: transformers("MixtralForCausalLM", num_local_experts=E, num_hidden_layers=2),
    "qwen2_moe": lambda: transformers("Qwen2MoeForCausalLM", num_experts=E, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: transformers("Qwen3MoeForCausalLM", num_experts=E, norm_topk_prob=True),
    "olmoe": lambda: transformers("OlmoeForCausalLM", num_experts=E),
    "deepseek_v3": lambda: transformers(
        "DeepseekV3ForCausalLM",
        num_hidden_layers=2,
        n_routed_experts=E,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=8,
    ),
    "gpt_oss": lambda: transformers(
        "GptOssForCausalLM",
        num_local_experts=E,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "switch": lambda: own(Routed(balance=0)),
    "top 2": lambda: own(Routed(k=2, activation="relu", balance=0)),
    "gshard": lambda: own(GShard()),
}
ROUTED = {
    "balanced mixtral": lambda: transformers("MixtralForCausalLM", num_local_experts=E, output_router_logits=True),
    "balanced switch": lambda: own(Routed(k=2)),
    "one expert takes all": lambda: own(Routed(skew=100.0)),
    "one expert takes none": lambda: own(Routed(k=3, skew=-100.0)),
}


@cache
def one(name: str) -> equality.Reference:
    return equality.reference({**MODELS, **ROUTED}[name])


def where(name: str) -> str:
    return "*" if name in ("gshard", "top 2") or "switch" in name or "expert" in name else "*.mlp.experts"


def spec(name: str, axis: str = "ep", **more: Any) -> dict[str, Any]:
    mesh = more.pop("mesh")
    return {"shardc": 1, "mesh": mesh, "experts": [{"match": where(name), "axis": axis}], **more}


def check(name: str, given: dict[str, Any]) -> shardc.Simulation:
    sim = one(name).on(given)
    equality.assert_equal(sim, one(name).loss, one(name).grads)
    return sim


# --- as on one device -------------------------------------------------------------------------------------------------

MESHES: dict[str, dict[str, Any]] = {
    "ep=2": {"mesh": {"ep": 2}},
    "ep=4": {"mesh": {"ep": 4}},
    "dp=2, experts over dp": {"mesh": {"dp": 2}, "axis": "dp"},
    "ep=2 tp=2": {"mesh": {"ep": 2, "tp": 2}, "shard": {"use": "structure"}},
    "pp=2 ep=2": {"mesh": {"pp": 2, "ep": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_equal(name: str, mesh: str, record_property: equality.Property) -> None:
    program = one(name).compile(spec(name, **MESHES[mesh]))
    sim = shardc.verify.simulate(program, one(name).model, one(name).batch)
    equality.record(record_property, name, mesh, one(name), program, sim)
    equality.assert_equal(sim, one(name).loss, one(name).grads)
    kinds = {n.meta["collective"].kind for s in program.stages for n in s.graph.nodes if "collective" in n.meta}
    assert "all_to_all" in kinds
    assert "all_gather" not in kinds


@pytest.mark.parametrize("mesh", ["ep=4", "dp=2, experts over dp", "ep=2 tp=2", "pp=2 ep=2"])
@pytest.mark.parametrize("name", ROUTED)
def test_routing(name: str, mesh: str) -> None:
    """Router losses are those of the global batch, also over microbatches; experts may take all tokens, or none."""
    check(name, spec(name, **MESHES[mesh]))


MICROBATCHES: dict[str, dict[str, Any]] = {
    "zero 3 and checkpoint": {
        "mesh": {"dp": 2},
        "axis": "dp",
        "data": {"axis": "dp", "zero": 3},
        "checkpoint": [{"match": "*"}],
        "batch": {"microbatches": 2},
    },
    "zero bubbles": {
        "mesh": {"pp": 2, "ep": 2},
        "pipeline": {"axis": "pp", "schedule": "zb-h1"},
        "batch": {"microbatches": 2},
    },
    "interleaved": {
        "mesh": {"pp": 2, "ep": 2},
        "pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"},
        "batch": {"microbatches": 2},
    },
}


@pytest.mark.parametrize("case", MICROBATCHES)
def test_router_losses_over_microbatches(case: str) -> None:
    """The balancing loss is a product of two sums over the batch: forward runs once more before, and nothing else."""
    sim = check("balanced switch", spec("balanced switch", **MICROBATCHES[case]))
    exchanges = [c for c in sim.comms if c.kind == "all_to_all" and c.direction == "forward"]
    assert len(exchanges) % 4 == 0  # each of two microbatches twice


OTHERS: dict[str, dict[str, Any]] = {
    "dp ep": {"mesh": {"dp": 2, "ep": 2}},
    "style words": {
        "mesh": {"ep": 2, "tp": 2},
        "shard": {"*.experts.gate_up_proj": "column", "*.experts.down_proj": "row"},
    },
    "two axes": {"mesh": {"dp": 2, "ep": 2}, "shard": {"*.experts.*_proj": {0: "dp"}}},
    "sequence parallel": {
        "mesh": {"dp": 2, "tp": 2},
        "axis": "dp",
        "shard": {"use": "model"},
        "activations": {"model.layers.*": {1: "tp"}},
    },
    "tokens whole": {"mesh": {"ep": 2}, "batch": {"axes": []}},
    "padded": {"mesh": {"ep": 3}, "uneven": "pad"},
    "zero 1": {"mesh": {"dp": 2, "ep": 2}, "data": {"axis": "dp", "zero": 1}},
    "zero 2 over both": {
        "mesh": {"dp": 2, "ep": 2},
        "data": {"axis": ["ep", "dp"], "zero": 2},
        "batch": {"microbatches": 2},
    },
    **{
        f"zero {zero}, experts over dp, others over ep": {
            "mesh": {"dp": 2, "ep": 2},
            "data": {"axis": ["dp", "ep"], "zero": zero},
            "batch": {"microbatches": 2},
        }
        for zero in (1, 2, 3)
    },
    "zero 3": {"mesh": {"ep": 2}, "data": {"axis": "ep", "zero": 3}},
    "checkpoint": {"mesh": {"ep": 2}, "checkpoint": [{"match": "model.layers.*"}]},
    "zero bubbles": {
        "mesh": {"pp": 2, "ep": 2},
        "pipeline": {"axis": "pp", "schedule": "zb-h1"},
        "batch": {"microbatches": 2},
    },
}


@pytest.mark.parametrize("case", OTHERS)
def test_with(case: str) -> None:
    check("mixtral", spec("mixtral", **OTHERS[case]))


def test_parameters_are_spread() -> None:
    """Each rank holds and sums its experts only: over the ranks that share them."""
    program = one("mixtral").compile(spec("mixtral", mesh={"dp": 2, "ep": 2}))
    p = program.param("model.layers.0.mlp.experts.gate_up_proj")
    assert p.value.local_shape(program.mesh) == (E // 2, 64, 64)
    assert p.reduce == ("dp",)
    assert program.param("model.layers.0.mlp.gate.weight").reduce == ("dp", "ep")


def test_of_two_data_axes_each_shards_what_the_other_splits() -> None:
    """Experts are split over ep already: their state is cut over dp; all else over the innermost axis, ep."""
    split = spec("mixtral", mesh={"dp": 2, "ep": 2}, data={"axis": ["dp", "ep"], "zero": 1})
    program = one("mixtral").compile(split)
    cut = {name: b.shard for b in program.buckets for name in b.params}
    experts = {p.name: "experts" in p.fqn for p in program.params}
    assert {cut[name] for name, inside in experts.items() if inside} == {"dp"}
    assert {cut[name] for name, inside in experts.items() if not inside} == {"ep"}


def test_routing_is_not_repeated() -> None:
    """A region sends its rows again, but not the counts."""
    sim = one("mixtral").on(spec("mixtral", **OTHERS["checkpoint"]))
    sent = collections.Counter(c.direction for c in sim.comms if c.kind == "all_to_all")
    assert sent == {"forward": 2 * 3, "recompute": 2 * 2, "backward": 2 * 2}
    sim = one("mixtral").on(
        spec("mixtral", mesh={"ep": 2}, checkpoint=[{"match": "model.layers.*", "save": ["collective"]}])
    )
    assert not [c for c in sim.comms if c.direction == "recompute" and c.kind == "all_to_all"]


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["ep", "dp"])
def test_bytes(axis: str) -> None:
    """Tokens x choices x hidden each way, in the program and in what ran; besides, a few counts."""
    name, n = "mixtral", 2
    program = one(name).compile(spec(name, axis, mesh={axis: n}))
    rows = zoo.BATCH * zoo.SEQ // n * 2 * zoo.HIDDEN * 8
    counts = E * 8
    planned = [n.meta["collective"] for n in program.stages[0].graph.nodes if "collective" in n.meta]
    exchanged = [c for c in planned if c.kind == "all_to_all"]
    assert [(c.bytes, c.backward) for c in exchanged] == [
        (counts, "none"),
        (rows, "all_to_all"),
        (rows, "all_to_all"),
    ] * 2
    assert all("experts '*.mlp.experts'" in c.cause for c in exchanged)
    assert all(c.kind in ("all_to_all", "all_reduce") for c in planned)
    ran = [
        c
        for c in shardc.verify.simulate(program, one(name).model, one(name).batch).comms
        if c.kind == "all_to_all" and c.bytes != counts
    ]
    assert {c.direction for c in ran} == {"forward", "backward"}
    sent = [c.bytes for c in ran if c.direction == "forward"]
    assert sent[::2] == [rows, rows]  # what came is sent back: on average as much
    assert sum(c.bytes for c in ran if c.direction == "backward") == sum(sent)


def test_precision() -> None:
    """Rows are sent, and products made, in the compute dtype."""
    program = one("switch").compile(spec("switch", mesh={"ep": 2}, precision={"compute": "bfloat16"}))
    nodes = [n for n in program.stages[0].graph.nodes if n.target is ops.experts_send]
    assert [n.meta["collective"].bytes for n in nodes] == [zoo.BATCH * zoo.SEQ // 2 * H * 2]
    sim, exact = shardc.verify.simulate(program, one("switch").model, one("switch").batch), one("switch").loss
    assert abs(float(sim.loss - exact)) <= 1e-2 * abs(float(exact))


# --- capacity ---------------------------------------------------------------------------------------------------------


class Dropping(Routed):
    """The reference: choices above the capacity are dropped by the model, position by position; of each microbatch,
    that is, of the same rows of every rank.
    """

    def __init__(self, ranks: int, microbatches: int) -> None:
        super().__init__(k=2)
        self.parts = ranks, microbatches

    def chosen(self, index: Tensor) -> Tensor:
        ranks, microbatches = self.parts
        parts = index.view(ranks, microbatches, -1).transpose(0, 1).reshape(microbatches, -1)
        kept = torch.stack([self.limited(part) for part in parts])
        return kept.view(microbatches, ranks, -1).transpose(0, 1).reshape(index.shape)

    def limited(self, index: Tensor) -> Tensor:
        taken = [0] * E
        limit = -(-index.numel() // E)  # a factor of 1
        kept = index.tolist()
        for at, e in enumerate(kept):
            taken[e] += 1
            kept[at] = e if taken[e] <= limit else -1
        return torch.tensor(kept)


CAPACITY: dict[str, tuple[int, dict[str, Any]]] = {  # ranks that split the batch
    "ep": (2, {"mesh": {"ep": 2}}),
    "dp ep": (4, {"mesh": {"dp": 2, "ep": 2}}),
    "tp ep": (2, {"mesh": {"tp": 2, "ep": 2}}),
    "dp ep, microbatches": (4, {"mesh": {"dp": 2, "ep": 2}, "batch": {"microbatches": 2}}),
    "pp ep, microbatches": (
        2,
        {"mesh": {"pp": 2, "ep": 2}, "batch": {"microbatches": 4}, "pipeline": {"axis": "pp", "stages": 2}},
    ),
}


@pytest.mark.parametrize("case", CAPACITY)
def test_capacity(case: str) -> None:
    ranks, more = CAPACITY[case]
    microbatches = more.get("batch", {}).get("microbatches", 1)
    model, batch = own(Dropping(ranks, microbatches))
    loss = model(**batch)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    given = spec("switch", **more, strict=True)
    given["experts"][0] |= {"capacity": 1.0} | ({"per": "microbatch"} if microbatches > 1 else {})
    plain = one("balanced switch")
    program = plain.compile(given)
    sim = shardc.verify.simulate(program, model, batch)
    equality.assert_equal(sim, loss.detach(), grads)
    assert float(sim.loss) != pytest.approx(float(plain.loss), rel=1e-9)
    assert "capacity 1.0" in program.text(full=True)
    assert program.verify().ok
    assert program.cost().memory.peak > 0  # a dry run on tensors without data: no size may hang on a number


@pytest.mark.parametrize(
    ("entry", "more", "what", "fix"),
    [
        (
            {},
            {},
            r"capacity 1.5 is a share of the global batch, of which microbatches see a part each",
            "per: microbatch",
        ),
        (
            {"per": "microbatch"},
            {"uneven": "pad"},
            r"128 tokens are not 6 \(3 ranks of 2 microbatches\)",
            "a multiple of 6 rows",
        ),
    ],
)
def test_capacity_with_microbatches_is_told(entry: dict[str, Any], more: dict[str, Any], what: str, fix: str) -> None:
    given = spec("switch", mesh={"ep": 3}, batch={"microbatches": 2}, **more)
    given["experts"][0] |= {"capacity": 1.5, **entry}
    with pytest.raises(shardc.ShardcError, match=what) as e:
        one("switch").compile(given)
    assert fix in e.value.errors[0].fix


def test_keep() -> None:
    index = torch.tensor([[0, 1], [0, 2], [0, 0], [1, 7]])
    assert ops.experts_keep(index, 3, 2).tolist() == [[0, 1], [0, 2], [-1, -1], [1, -1]]
    assert ops.experts_keep(index.view(2, 2, 2), 3, 1).tolist() == [[[0, 1], [-1, 2]], [[0, -1], [1, -1]]]


def test_cost() -> None:
    """A dry run takes every expert to get as much as any other."""
    cost = one("switch").compile(spec("switch", mesh={"ep": 2})).cost()
    assert cost.memory
    assert cost.flops > 0


# --- how tokens are spread --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_loads(mesh: dict[str, int]) -> None:
    """Counted once over the global batch, whatever ranks have copies; over microbatches too."""
    name = "one expert takes all"
    model, batch = one(name).model, one(name).batch
    more: dict[str, dict[str, Any]] = {
        "tp": {"shard": {"head": "row"}},
        "pp": {"pipeline": {"axis": "pp", "stages": 2}},
    }
    given = spec(name, mesh=mesh, **{k: v for axis in mesh for k, v in more.get(axis, {}).items()})
    given["experts"][0]["capacity"] = 2.0
    program = one(name).compile(given)

    def rank(runtime: Any) -> Any:
        engine = program.engine(model, optimizer=None, mesh=runtime, routing=True)
        engine.backward(batch)
        return engine.loads

    tokens, limit = zoo.BATCH * zoo.SEQ, 2 * zoo.BATCH * zoo.SEQ // E
    for (load,) in loopback(program.mesh, rank):
        assert load.tokens == tuple(limit if e == 3 else 0 for e in range(E))
        assert load.dropped == pytest.approx(1 - limit / tokens)
        busiest = 2 * mesh.get("dp", 1)  # of two ranks one has the expert; and the first tokens come first
        assert load.imbalance == pytest.approx(busiest)
        assert str(load) == f"experts: 0-{limit} tokens an expert, busiest rank x{busiest}.00, 75.0% dropped"


def test_step_line() -> None:
    load = Load("moe", (3, 5), 0.25, 1.5)
    line = {
        "step": 1,
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": None,
        "samples_per_second": 1.0,
        "memory_mb": 1.0,
        "experts": [dataclasses.asdict(load)],
    }
    assert step_lines.fitted(step_lines.columns(line)).endswith(
        "  experts 3-5 tokens, busiest rank x1.50, 25.0% dropped"
    )


# --- the artifact, and processes ------------------------------------------------------------------------------------


def test_saved(tmp_path: Path) -> None:
    program = one("gpt_oss").compile(spec("gpt_oss", mesh={"ep": 2, "tp": 2}))
    program.save(tmp_path)
    again = shardc.load(tmp_path)
    assert again.text(full=True) == program.text(full=True)
    assert again.verify().ok
    assert "stripes(x)" in again.text(full=True)


def work(rank: int, port: int, folder: str) -> None:
    """One process of two: a step without update, and its gradients put together."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found: dict[str, Any] = {}
    for name in ("top 2", "one expert takes all"):
        with zoo.Wide():
            model, batch = {**MODELS, **ROUTED}[name]()
        program = shardc.load(Path(folder) / name)
        engine = program.engine(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        found[name] = (
            engine.step(batch),
            {p.fqn: gather(engine.params[p.name].grad, p.layout, engine.mesh) for p in program.params},
        )
    if rank == 0:
        torch.save(found, Path(folder) / "result.pt")
    engine.close()


def test_processes(tmp_path: Path) -> None:
    """Over gloo, also where one rank gets all rows."""
    for name in ("top 2", "one expert takes all"):
        one(name).compile(spec(name, mesh={"ep": 2})).save(tmp_path / name)
    warm.ranks(work, launch.free_port(), str(tmp_path), world=2)
    for name, (loss, grads) in torch.load(tmp_path / "result.pt").items():
        equality.assert_equal(Namespace(loss=loss, grads=grads), one(name).loss, one(name).grads)


# --- the function -----------------------------------------------------------------------------------------------------


def clamped(y: Tensor) -> Tensor:
    gate, up = y[..., ::2], y[..., 1::2]
    return (up.clamp(-1, 1) + 1) * gate * torch.sigmoid(1.7 * gate)


@pytest.mark.parametrize(("activation", "m"), [("silu", 2 * INNER), ("relu", INNER), (clamped, 2 * INNER)])
@pytest.mark.parametrize("transposed", [False, True])
def test_function(activation: Any, m: int, *, transposed: bool) -> None:
    """Against a loop over tokens, with biases and dropped choices; as text, too."""
    g = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    x, weights, index = real(2, 5, H), real(2, 5, 3), torch.randint(-1, E, (2, 5, 3), generator=g)
    up, down = (real(E, H, m), real(E, INNER, H)) if transposed else (real(E, m, H), real(E, H, INNER))
    up_bias, down_bias = real(E, m), real(E, H)
    leaves = [x, weights, up, down, up_bias, down_bias]
    y = shardc.nn.experts(
        x, index, weights, up, down, activation=activation, up_bias=up_bias, down_bias=down_bias, transposed=transposed
    )
    between = expert_activation.read(shardc.nn.text_of(activation, m, INNER))
    rows = []
    for token, chosen, share in zip(x.flatten(0, 1), index.flatten(0, 1).tolist(), weights.flatten(0, 1), strict=True):
        row = torch.zeros(H, dtype=torch.float64)
        for e, w in zip(chosen, share, strict=True):
            if e >= 0:
                a, b = (up[e].T, down[e].T) if transposed else (up[e], down[e])
                row = row + w * (b @ between(a @ token + up_bias[e]) + down_bias[e])
        rows.append(row)
    z = torch.stack(rows).view_as(x)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    weight = torch.randn(y.shape, generator=g, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(y, leaves, weight), torch.autograd.grad(z, leaves, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, transposed: bool) -> None:
    """torch's grouped product, which GPUs take, is the same as one product an expert; here on the CPU. Some experts get
    no row.
    """
    g = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(5, 16, 24, generator=g).to(dtype),
        torch.randn(5, 24 if transposed else 16, generator=g).to(dtype),
    )
    rows = torch.randn(11, 16 if transposed else 24, generator=g).to(dtype)
    grad = torch.randn(11, bias.shape[1], generator=g).to(dtype)
    called, kernel, rtol = [], torch.nn.functional.grouped_mm, 2e-2 if dtype is torch.bfloat16 else 1e-5

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        called.append(args)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)

    def run(*, at_once: bool, sizes: tuple[int, ...], b: Tensor | None) -> list[Tensor]:
        monkeypatch.setattr(grouped_mm, "has_kernel", lambda weight: at_once)
        groups = grouped_mm.Groups(sizes, rows.device)
        return [
            grouped_mm.product(rows, weight, b, groups, transposed),
            grouped_mm.grad_of_rows(grad, weight, groups, transposed),
            grouped_mm.grad_of_weight(grad, rows, weight, groups, transposed),
        ]

    for sizes in ((3, 0, 6, 2, 0), (0, 0, 11, 0, 0)):
        for b in (None, bias):
            for found, expected in zip(
                run(at_once=True, sizes=sizes, b=b), run(at_once=False, sizes=sizes, b=b), strict=True
            ):
                torch.testing.assert_close(found, expected, rtol=rtol, atol=5 * rtol)
    assert len(called) == 3 * 4
    monkeypatch.undo()
    assert not grouped_mm.has_kernel(weight)  # on a CPU: an expert after the other


def test_the_gradient_of_a_bias() -> None:
    g = torch.randn(11, 4, dtype=torch.float64)
    groups = grouped_mm.Groups((3, 0, 8), g.device)
    expected = torch.stack([g[:3].sum(0), torch.zeros(4, dtype=torch.float64), g[3:].sum(0)])
    torch.testing.assert_close(grouped_mm.grad_of_bias(g, groups), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("biased", [False, True])
def test_what_a_layer_keeps(biased: bool) -> None:
    """Beside weights: the tokens, once, however many experts each has; the choices; the first product's result. Not
    what the activation makes of it, and not what the experts made.
    """
    t, k, e, h, i = 24, 2, 4, 8, 12
    x, weights = torch.randn(t, h, requires_grad=True), torch.rand(t, k, requires_grad=True)
    up, down = (torch.randn(e, *s, requires_grad=True) for s in ((2 * i, h), (h, i)))
    biases = [torch.randn(e, n, requires_grad=True) if biased else None for n in (2 * i, h)]
    given = {a.untyped_storage()._cdata for a in (up, down, *biases) if a is not None}
    found: dict[int, int] = {}

    def note(a: Tensor) -> Tensor:
        if a.untyped_storage()._cdata not in given:
            found[a.untyped_storage()._cdata] = a.untyped_storage().nbytes()
        return a

    with torch.autograd.graph.saved_tensors_hooks(note, lambda a: a):
        text = "b, c = halves(x); a = silu(b); mul(a, c)"
        ops.experts(x, torch.randint(e, (t, k)), weights, up, down, *biases, text)
    assert sum(found.values()) == 4 * t * h + 8 * t * k + 4 * t * k + 4 * t * k * 2 * i


def test_activations_as_text() -> None:
    assert shardc.nn.text_of("silu", 8, 4) == "b, c = halves(x); a = silu(b); mul(a, c)"
    assert shardc.nn.text_of(lambda y: torch.relu(y) ** 2, 4, 4) == "a = relu(x); pow(a, 2)"
    for wrong in ("import os", "relu(x); y = relu(x)", "sum(x)", "a, b = halves(x)", "__import__('os')"):
        with pytest.raises(ValueError, match=r"not a statement|not Python|elementwise|nothing|malformed"):
            expert_activation.read(wrong)


WRONG: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any], str]] = {
    "no stack": (lambda x, i, w, u, d: shardc.nn.experts(x, i, w, u[0], d), "are not stacks of matrices"),
    "other way round": (lambda x, i, w, u, d: shardc.nn.experts(x, i, w, u.mT, d), "do not fit x"),
    "choices": (lambda x, i, w, u, d: shardc.nn.experts(x, i[:2], w, u, d), "are not choices of the tokens"),
    "bias": (lambda x, i, w, u, d: shardc.nn.experts(x, i, w, u, d, up_bias=x), "up_bias has shape"),
    "name": (
        lambda x, i, w, u, d: shardc.nn.experts(x, i, w, u, d, activation="nope"),
        "activation='nope' cannot make 12 columns of 24",
    ),
    "rows": (
        lambda x, i, w, u, d: shardc.nn.text_of(lambda y: y.softmax(-1)[:, :INNER], 2 * INNER, INNER),
        "is not elementwise",
    ),
    "columns": (
        lambda x, i, w, u, d: shardc.nn.text_of(lambda y: torch.relu(y[:, 1 : INNER + 1]), 2 * INNER, INNER),
        "columns that are not one of equal parts",
    ),
    "nothing": (lambda x, i, w, u, d: shardc.nn.text_of(lambda y: y, INNER, INNER), "computes nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case: str) -> None:
    call, what = WRONG[case]
    tensors = (
        torch.randn(5, H),
        torch.zeros(5, 2, dtype=torch.long),
        torch.randn(5, 2),
        torch.randn(E, 2 * INNER, H),
        torch.randn(E, H, INNER),
    )
    with pytest.raises(shardc.ShardcError, match=what):
        call(*tensors)


# --- wrong specs ------------------------------------------------------------------------------------------------------

SPECS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str, str]] = {
    "divides": (
        {"mesh": {"ep": 3}, "batch": {"axes": []}},
        [{"match": "*"}],
        "the 8 experts of the model are not divisible by ep=3",
        "ep=2 or 4",
    ),
    "nothing": (
        {"mesh": {"ep": 2}},
        [{"match": "*.mlp"}],
        r"pattern '\*.mlp' matches no module that holds experts",
        "experts are in the model: match: '*'",
    ),
    "no experts": (
        {"mesh": {"ep": 2}},
        [{"match": "head"}],
        "has no experts that shardc recognises",
        "shardc.nn.experts",
    ),
    "twice": ({"mesh": {"ep": 2}}, [{"match": "*"}, {"match": "*"}], "never wins", "delete it"),
    "split already": (
        {"mesh": {"ep": 2}, "shard": {"up": {0: "ep"}}},
        [{"match": "*"}],
        "up is split over ep by `shard:` too",
        "drop that entry",
    ),
}


@pytest.mark.parametrize("case", SPECS)
def test_wrong_specs(case: str) -> None:
    more, entries, what, fix = SPECS[case]
    with pytest.raises(shardc.ShardcError, match=what) as e:
        one("switch").compile({"shardc": 1, **more, "experts": [{"axis": "ep", **x} for x in entries]})
    assert e.value.errors[0].where.startswith("spec: experts[")
    assert fix in e.value.errors[0].fix


def test_a_style_without_meaning_names_the_op() -> None:
    with pytest.raises(shardc.ShardcError) as e:
        one("switch").compile({"shardc": 1, "mesh": {"tp": 2}, "shard": {"down": "column"}})
    assert e.value.what == "down is not a weight that 'column' can split: it is used by experts"


@pytest.mark.parametrize(
    ("how", "what", "fix"),
    [
        ("rows", "no experts that shardc recognises", "rewrite a Python loop over experts"),  # one layer each: no op
        ("branch", "no experts that shardc recognises", "rewrite a Python loop over experts"),
        ("all", "no experts that shardc recognises", "rewrite a Python loop over experts"),
        ("stack", "are put together from several parameters", "store them as one parameter"),
    ],
)
def test_loops(how: str, what: str, fix: str) -> None:
    model, batch = own(Loop(how))
    with pytest.raises(shardc.ShardcError, match=what) as e:
        shardc.compile(model, batch, {"shardc": 1, "mesh": {"ep": 2}, "experts": [{"match": "*", "axis": "ep"}]})
    assert fix in e.value.errors[0].fix


def test_batch_that_does_not_divide() -> None:
    """Outside of experts the ranks of an axis of their own do the same then, and it is said."""
    program = one("mixtral").compile(spec("mixtral", mesh={"dp": 4, "ep": 4}))
    assert any(
        "is not divisible by 16 ranks: outside of experts the ranks of ep do the same" in n for n in program.notes
    )
    sim = shardc.verify.simulate(program, one("mixtral").model, one("mixtral").batch)
    equality.assert_equal(sim, one("mixtral").loss, one("mixtral").grads)
