"""The whole flow: golden texts of compiled programs, the largest shape, and what compile does not depend on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import shardc
from shardc.artifact import emit
from tests import zoo
from tests.bench import shapes
from tests.test_equal import spec_of


@pytest.mark.parametrize(("name", "sequence"), [("gpt", False), ("gpt", True), ("llama", True)])
def test_golden_programs(name: str, sequence: bool, golden: Callable[[str, str], None]) -> None:
    """One layer, dp=2 × tp=2: every value's type and every collective. Line numbers of models are masked: they are not
    ours.
    """
    model, batch = zoo.ALL[name](layers=1)
    program = shardc.compile(model, batch, spec_of(name, {"dp": 2, "tp": 2}, sequence=sequence), prove=False)
    golden(f"{name}{'-sp' if sequence else ''}.txt", re.sub(r"(\w+\.py):\d+", r"\1", emit.text(program, full=True)))


def test_a_70b_model_compiles_from_the_meta_device_whatever_the_number_of_ranks() -> None:
    """Layers of Llama-70B's shape on 32 ranks and on 4,096: one program of one rank, of the same size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shapes.llama("70B", num_hidden_layers=32)))
        batch = {k: torch.zeros(512, 4096, dtype=torch.long) for k in ("input_ids", "labels")}
    sizes = []
    for dp in (4, 512):
        program = shardc.compile(model, batch, spec_of("llama", {"dp": dp, "tp": 8}))
        sizes.append(len(program.stages[0].graph.nodes))
        layer = [
            n
            for n in program.stages[0].graph.nodes
            if n.meta.get("collective") and n.meta["source"].module.startswith("model.layers.20.")
        ]
        assert sum(n.meta["collective"].kind == "all_reduce" for n in layer) == 2
        assert sum(n.meta["collective"].backward == "all_reduce" for n in layer) == 2
        assert not program.notes[1:]  # the first says that the numeric proof was left out for its size
    assert sizes[0] == sizes[1]


def test_the_model_is_left_as_it_was() -> None:
    model, batch = zoo.gpt()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    program = shardc.compile(model, batch, spec_of("gpt", {"dp": 1, "tp": 2}))
    shardc.verify.simulate(program, model, batch, steps=2, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_passes_are_told_and_timed() -> None:
    told: list[str] = []
    program = shardc.compile(*zoo.mlp(), {"shardc": 1, "mesh": {"dp": 2}}, on_pass=told.append)
    after = ["canonical", "unknown_ops", "annotate", "place", "partition", "gradient_buckets", "joint", "unused_axes"]
    assert told == ["capture", *after]
    assert list(program.meta["pass_seconds"]) == told


def test_an_op_without_a_rule_is_refused_or_replicated() -> None:
    @torch.library.custom_op("shardctest::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy(force=True)[::-1] * 2)  # torch cannot look into it

    odd.register_fake(torch.empty_like)
    odd.register_autograd(lambda ctx, g: g.flip(0) * 2)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.shardctest.odd(self.a(x)).square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, batch = Net().double(), (torch.randn(4, 8, dtype=torch.float64),)
    with pytest.raises(shardc.ShardcError, match=r"op shardctest\.odd\.default \(1×\) has no rule") as caught:
        shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    assert "test_compile.py" in caught.value.where
    assert "unknown_ops: replicate" in caught.value.fix
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "unknown_ops": "replicate"})
    assert "every rank runs it whole" in program.notes[0]
    sim = shardc.verify.simulate(program, model, batch)
    loss = model(*batch)
    loss.backward()
    torch.testing.assert_close(sim.loss, loss.detach())
    torch.testing.assert_close(sim.grads["a.weight"], model.a.weight.grad)
