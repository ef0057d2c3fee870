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
from torch import Tensor, nn

from shardc.cost import Device, device
from shardc.machine.device import Outside
from shardc.plan.few_layers import Subject
from shardc.plan.planner import Planner
from shardc.plan.records import Records
from shardc.plan.source import Source
from shardc.plan.space import CHECKPOINTS, ON_HOST, Choice


class Block(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, layers: int, hidden: int, wide: int, vocab: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.h = nn.ModuleList(Block(hidden, wide) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.h:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


MODELS = ((8, 64, 256, 128), (12, 256, 512, 64), (6, 512, 2048, 4096))


@functools.cache
def records(model: int) -> Records:
    """Of one model: its dry runs serve all cases."""
    with torch.device("meta"):
        made = Stack(*MODELS[model])
    return Records(Source(lambda: Subject.of(made, {"ids": torch.empty(16, 64, dtype=torch.long)})))


def planner(model: int, on: Device) -> Planner:
    made = Planner(records(model).source, on, "bfloat16", 0.05, "it", lambda what, done, of: None)
    made.__dict__["records"] = records(model)
    return made


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


def best(model: int, on: Device, devices: int, batch: int) -> float:
    """Seconds of the fastest estimate that fits; inf where nothing does."""
    plans = planner(model, on)
    fewer = (devices >> i for i in range(devices.bit_length()))  # others may be idle
    found = (x for n in fewer for x in plans.estimates(n, batch, list(plans.finder.cores(n))))
    return min((r.seconds for _, r in found if r.peak <= plans.usable), default=float("inf"))


def test_the_best_is_no_slower_with_more(pytestconfig: pytest.Config) -> None:
    """More devices, some of which may be idle; more memory. So no split that was left out could have been the best."""
    for number in numbers(pytestconfig, 1):
        r = random.Random(number)
        model, on = r.randrange(len(MODELS)), machine(r)
        devices, batch, memory = r.choice([1, 2, 4, 8, 16]), r.choice([8, 32]), r.choice([2e6, 2e7, 1e8])
        found = {
            (nbytes, n): best(model, on.model_copy(update={"memory": nbytes}), n, batch)
            for nbytes in (memory, 2 * memory, 8 * memory, on.memory)
            for n in (devices, 2 * devices)
        }
        for (nbytes, n), seconds in found.items():
            for (more, others), faster in found.items():
                if more >= nbytes and others >= n:
                    assert faster <= seconds * (1 + 1e-9), (number, (nbytes, n), (more, others))


def test_no_split_that_is_left_out_is_the_best(pytestconfig: pytest.Config) -> None:
    """The best of the splits that bounds let through is the best of all."""
    for number in numbers(pytestconfig, 2):
        r = random.Random(number)
        on, devices, model, batch = machine(r), r.choice([2, 4]), 0, 32
        plans = planner(model, on.model_copy(update={"memory": r.choice([2e6, 2e7, 80e9])}))
        finder, fewer = plans.finder, [devices >> i for i in range(devices.bit_length())]
        every = [
            rough.seconds
            for n in fewer
            for core in finder.cores(n)
            for keep in CHECKPOINTS
            if keep not in ON_HOST and (again := finder.accepted(core._replace(checkpoint=keep))) is not None
            for some in [list(finder.choices([again], n, batch))]
            for rough in finder.estimates.of(some, finder.library.core(Choice(**again._asdict())))
            if rough.peak <= plans.usable
        ]
        found = best(model, plans.device, devices, batch)
        assert not every or found <= min(every) * (1 + 1e-9), number
