"""What a record of forward tells of two programs: nothing where they are the same model, whatever the spec is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.capture import capture
from shardc.ir.forward_record import ForwardRecord


class Net(nn.Module):
    def __init__(self, *, p: float = 0.1, power: int = 2, act: Any = F.relu, by: float = 1.0, swap: bool = False):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(p)
        self.power, self.act, self.by, self.swap = power, act, by, swap

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.down, self.up) if self.swap else (self.up, self.down)
        h = b(self.drop(self.act(a(x)))) * torch.tensor([self.by] * 8)
        return (h - x).pow(self.power).sum() / x.shape[0]  # type: ignore[no-any-return]


def record(rows: int = 8, **settings: Any) -> ForwardRecord:
    found = capture(Net(**settings), {"x": torch.ones(rows, 8)}, prove=False).record
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({}, []),
        ({"p": 0.2}, ["1 fewer dropout(p=0.1, train=True); 1 more dropout(p=0.2, train=True)"]),
        ({"power": 4}, ["1 fewer pow(exponent=2); 1 more pow(exponent=4)"]),
        ({"act": F.gelu}, ["1 fewer relu(); 1 more gelu("]),
        ({"by": 2.0}, ["constant(type=f32[8], numbers="]),
        ({"swap": True}, ["the same ops are connected in another way"]),
        ({"rows": 4}, ["batch: the checkpoint was trained with x f32[8, 8], and this run has x f32[4, 8]"]),
    ],
)
def test_what_is_told(now: dict[str, Any], told: list[str]) -> None:
    lines = list(record().differences(record(**now)))
    assert len(lines) == bool(now)
    assert all(part in "\n".join(lines) for part in told), lines


@pytest.mark.parametrize(
    "spec",
    [
        {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
        {"mesh": {"tp": 2}, "shard": {"use": "structure"}, "precision": {"compute": "bfloat16"}},
        {"mesh": {"dp": 2}, "data": {"zero": 3}, "checkpoint": [{"match": "down", "save": ["linear"]}]},
        {"mesh": {"pp": 2}, "pipeline": {"axis": "pp"}, "batch": {"microbatches": 2}},
    ],
)
def test_it_is_that_of_the_model_alone(spec: dict[str, Any], tmp_path: Any) -> None:
    with torch.device("meta"):
        model = Net()
    program = shardc.compile(model, {"x": torch.ones(8, 8)}, {"shardc": 1, **spec}, prove=False)
    program.save(tmp_path)
    assert shardc.load(tmp_path).record == program.record == record()


def test_what_is_no_record_is_none() -> None:
    """A checkpoint may be anybody's."""
    good = json.loads(json.dumps(record().to_json()))
    assert ForwardRecord.read(good) == record()
    wrong: list[Any] = [None, 3, [], {}, {**good, "more": 1}, {**good, "digest": 3}, {**good, "inputs": [1]}]
    wrong += [{**good, "ops": {"relu()": count}} for count in ("1", [], [1], True, 1.0)]
    wrong += [{**good, "ops": {op: 1}} for op in ("relu", "", "relu(\n)", "relu(" + "x" * 2000 + ")")]
    assert [ForwardRecord.read(x) for x in wrong] == [None] * len(wrong)
    other = ForwardRecord.read({**good, "by": "shardc 0.1.0, torch 1.13", "digest": "", "ops": {}})
    assert other is not None
    assert list(other.differences(record())) == []  # another torch may spell the same model otherwise


def test_it_is_made_when_it_is_asked_for_with_the_constants_of_the_capture() -> None:
    scale = torch.tensor([2.0, 3.0])

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w * scale).sum()  # type: ignore[no-any-return]

    def captured() -> Any:
        return capture(Scaled(), {"x": torch.ones(4, 2)}, prove=False)

    program, then = captured(), captured().record
    scale.fill_(1.0)
    assert program.record == then
    assert program.record is program.record
    assert captured().record != then
