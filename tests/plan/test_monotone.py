"""What holds on any machine: more devices and more memory make the best estimate no slower. Models and devices are
drawn at random, by the numbers from 0 on: everybody tries the same ones. `--fuzz N` tries N of them, `--fuzz-from M`
begins with the number M.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from shardc.cost import Device, device
from shardc.machine.device import Outside
from shardc.plan.few_layers import Subject
from shardc.plan.planner import Planner
from shardc.plan.runs import Runs
from tests.plan.test_plan import Stack

#: (layers, hidden features, words, features within a layer)
MODELS = ((8, 64, 128, 256), (12, 256, 64, 512), (6, 512, 4096, 2048))


@functools.cache
def runs(model: int) -> Runs:
    """Of one model: its dry runs serve all cases."""
    with torch.device("meta"):
        made = Stack(*MODELS[model])
    return Runs(Subject(made, {"ids": torch.empty(16, 64, dtype=torch.long)}))


def planner(model: int, on: Device) -> Planner:
    return Planner(runs(model), on, "bfloat16", 0.05, "it", lambda what, done, of: None)


def machine(r: random.Random) -> Device:
    """A datasheet's device, with other links, nodes and latencies."""
    one = device(r.choice(["h100-80g", "a100-80g", "l40s"]))
    share = 10 ** r.uniform(-2, 0)
    links = {
        w: getattr(one, w).model_copy(update={"bandwidth": getattr(one, w).bandwidth * share})
        for w in ("within", "between")
    }
    update: dict[str, Any] = {**links, "node": r.choice([2, 4, 8]), "outside": Outside()}
    if r.random() < 0.5:
        update |= {"launch": 0.0, "host": 0.0}
    return one.model_copy(update=update)


def numbers(config: pytest.Config, few: int) -> range:
    """Of what is drawn. few: how many of them, where `--fuzz` does not say."""
    first = config.getoption("--fuzz-from")
    return range(first, first + (config.getoption("--fuzz") or few))


def test_a_models_flops_are_those_that_its_trained_weights_need() -> None:
    """Each product has one in backward for each operand with a gradient."""

    def flops(trained: str) -> float:
        with torch.device("meta"):
            made = Stack(*MODELS[0])
        for name, p in made.named_parameters():
            p.requires_grad_(name.startswith(trained))
        subject = Subject(made, {"ids": torch.empty(16, 64, dtype=torch.long)})
        return Planner(Runs(subject), device("h100-80g"), "bfloat16", 0.05, "it", lambda *_: None).library.flops

    layers, hidden, vocab, wide = MODELS[0]
    forward = 2 * 64 * (layers * 2 * hidden * wide + hidden * vocab)
    assert flops("") == 3 * forward
    assert flops("head") == forward + 2 * 64 * hidden * vocab
    assert flops("h.0.norm") == 2 * forward
