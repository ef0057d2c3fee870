"""Equal layers are traced once, and the program is the same to the letter as if each had been traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardc.artifact import emit
from shardc.capture import capture, equal_layers
from shardc.errors import ShardcError
from shardc.ir.program import Program
from tests import zoo
from tests.zoo import hf, hf_more


class Block(nn.Module):
    def __init__(self, number: int, scale: float = 1.0) -> None:
        super().__init__()
        self.number, self.scale = number, scale
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        return x + gain * self.scale * self.fc(self.norm(x)).relu()


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = {"x": torch.linspace(-1, 1, 32).view(4, 8)}


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many layers were copied, at every try; the last of several is 0."""
    found: list[int] = []
    unfold = equal_layers.unfold

    def count(model: nn.Module, exported: Any, calls: Any, cut: Any) -> None:
        unfold(model, exported, calls, cut)
        found.append(len(calls))

    with mock.patch.object(equal_layers, "unfold", count):
        yield found


def whole(model: nn.Module, batch: object) -> Program:
    with mock.patch.object(equal_layers, "_layers", return_value=()):
        return capture(model, batch, prove=False)


def compared(model: nn.Module, batch: object = X) -> int:
    """How many layers were copied. The text is that of the model traced whole, with all that stands beside it."""
    with counted() as copies:
        folded = capture(model, batch, prove=False)
    other = whole(model, batch)
    assert emit.text(folded, full=True) == emit.text(other, full=True)
    assert (folded.notes, folded.still, folded.evaluates) == (other.notes, other.still, other.evaluates)
    return copies[-1]


def test_of_equal_layers_the_first_alone_is_traced() -> None:
    calls = []
    forward = Block.forward

    def count(self: Block, x: Tensor, gain: float = 1.0) -> Tensor:
        calls.append(id(self))
        return forward(self, x, gain)

    with mock.patch.object(Block, "forward", count):
        model = Stack([Block(i) for i in range(12)])
        capture(model, X, prove=False)
        tries = len(calls)
        calls.clear()
        capture(nn.Sequential(nn.Linear(8, 8), model), X["x"], prove=False)
    assert tries == 2  # the first layer's input has no gradient, the others' has
    assert len(calls) == 1
    assert compared(Stack([Block(i) for i in range(12)])) == 10


MODELS: dict[str, Callable[[], zoo.Built]] = {
    "gpt": lambda: zoo.gpt(layers=3),
    "llama": lambda: zoo.llama(layers=3),  # casts that give their operand back
    "resnet_bn": lambda: zoo.ALL["resnet_bn"](),  # writes to buffers
    "bart": lambda: hf.build(hf.FAMILIES["bart"]),  # two lists; all layers of one read one value
    "xlm": lambda: hf.build(hf_more.FAMILIES["xlm"]),  # what a layer gives is written in place
    "whisper": lambda: hf.build(hf.FAMILIES["whisper"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_come_out_as_if_they_were_traced_whole(name: str) -> None:
    with zoo.Wide():
        assert compared(*MODELS[name]()) > 0


def test_layers_that_differ_in_what_forward_reads_are_traced_each() -> None:
    model = Stack([Block(i, 1.0 + (i > 2)) for i in range(6)])
    assert compared(model) == 1 + 2
    text = emit.text(capture(model, X, prove=False), full=True)
    assert text.count(", 2.0)") == 3


def test_what_the_model_does_between_its_layers_is_traced() -> None:
    class Skips(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x, 1.0 if i < 3 else 0.5) if i != 1 else x + i
            return x.mean()

    model = Skips([Block(i) for i in range(6)])
    assert compared(model) == 2
    program = capture(model, X)  # and proven on numbers
    assert emit.text(program, full=True).count("linear") >= 5


def test_a_layer_that_leaves_something_behind_is_traced() -> None:
    class Sums(Stack):
        def __init__(self, layers: list[nn.Module]) -> None:
            super().__init__(layers)
            for layer in layers:
                layer.root = (self,)

        def forward(self, x: Tensor) -> Tensor:
            self.losses: list[Tensor] = []
            for layer in self.layers:
                x = layer(x)
            return x.mean() + sum(self.losses)

    class Leaks(Block):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            y = self.fc(x)
            self.root[0].losses.append(y.square().mean())
            return x + y

    model = Sums([Leaks(i) for i in range(3)])
    with counted() as copies:
        program = capture(model, X)
    assert copies[-1] == 0
    assert emit.text(program, full=True) == emit.text(whole(model, X), full=True)


def test_a_layer_that_counts_is_traced() -> None:
    counter = [0]

    class Counts(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.counter = counter

        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            self.counter[0] = (self.counter[0] + 1) % 3
            return x + self.fc(x) * (self.counter[0] + 1)

    assert compared(Stack([Counts(i) for i in range(3)])) == 0


def test_hooks_inside_of_a_layer_run_for_each() -> None:
    model = Stack([Block(i) for i in range(3)])
    for i, layer in enumerate(model.layers):
        layer.get_submodule("fc").register_forward_hook(lambda m, args, y, i=i: y * (i + 1))
    assert compared(model) == 0


def test_frozen_layers_are_none_of_the_others() -> None:
    model = Stack([Block(i) for i in range(6)])
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    assert compared(model) == 1 + 2  # the first trained one gets a value without a gradient


def test_a_shared_weight_stays_shared() -> None:
    model = Stack([Block(i) for i in range(4)])
    for layer in model.layers:
        layer.fc.weight = model.layers[0].fc.weight
    assert compared(model) == 2


def test_a_constant_that_each_layer_makes_is_one() -> None:
    class Makes(Block):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return x + self.fc(x) * torch.tensor([0.5, self.scale]).sum() + torch.tensor([0.5, 1.0]).sum()

    model = Stack([Makes(i) for i in range(6)])
    assert compared(model) == 4
    assert [b.name for b in capture(model, X).buffers] == ["constant_0"]
    assert compared(Stack([Makes(i, 1.0 + (i > 2)) for i in range(6)])) == 1 + 2


def test_a_tensor_of_somebodys_that_a_layer_reads_is_traced_in_each() -> None:
    held = torch.tensor(0.5)

    class Holds(Block):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return x + self.fc(x) * held

    assert compared(Stack([Holds(i) for i in range(6)])) == 0


@pytest.mark.parametrize("where", ["model", "object", "list"])
def test_what_forward_sets_between_its_layers_is_what_each_reads(where: str) -> None:
    """Not on a layer: on the model, on an object that all layers hold, in a list of the model's."""

    class Scale:
        now = 1.0

    class Reads(Block):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            found = {
                "model": lambda: self.root[0].now,
                "object": lambda: self.held.now,
                "list": lambda: self.root[0].all[-1],
            }
            return x + self.fc(x) * found[where]()

    class Sets(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                if where == "model":
                    self.now = 1.0 + (i > 2)
                elif where == "object":
                    self.held.now = 1.0 + (i > 2)
                else:
                    self.all.append(1.0 + (i > 2))
                x = layer(x)
            return x.mean()

    model = Sets([Reads(i) for i in range(6)])
    model.held, model.all, model.now = Scale(), [], 1.0
    for layer in model.layers:
        layer.root, layer.held = (model,), model.held
    assert compared(model) == (0 if where == "list" else 1 + 2)


def test_a_later_change_of_a_layer_that_was_not_traced_is_noticed() -> None:
    model = Stack([Block(i) for i in range(3)])
    program = capture(model, X, prove=False)
    assert program.check_attributes is not None
    program.check_attributes(model.named_modules())
    model.layers[2].scale = 3.0
    with pytest.raises(ShardcError, match=r"layers\.2\.scale: forward reads it"):
        program.check_attributes(model.named_modules())


def test_the_model_is_as_it_was_also_after_an_error() -> None:
    class Fails(Block):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            raise ValueError("no")

    model = Stack([Block(0), Block(1), Fails(2), Fails(3)])
    with pytest.raises(ShardcError, match="no"):
        capture(model, X)
    assert not any("forward" in vars(layer) for layer in model.layers)


class Looks(Stack):
    """Its forward looks into its layers."""

    def __init__(self, look: Callable[[Looks], Any], layers: int = 5) -> None:
        super().__init__([Block(i) for i in range(layers)])
        self.look, self.first = look, nn.Linear(8, 8)
        self.held = [layer.fc for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x)) + self.look(self)


LOOKS: dict[str, Callable[[Looks], Any]] = {
    "parameters": lambda m: sum(p.square().sum() for p in m.parameters()),
    "weight": lambda m: m.layers[3].fc.weight.square().sum(),
    "held": lambda m: m.held[3].weight.square().sum(),
    "call": lambda m: m.layers[3].fc(m.first.weight).sum(),
    "has": lambda m: float(hasattr(m.layers[3], "fc")),
    "count": lambda m: float(sum(1 for _ in m.modules())),
    "state": lambda m: float(len(m.state_dict())),
    "applied": lambda m: m.layers[2].double() and 1.0,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_that_looks_into_its_layers(look: str) -> None:
    model = Looks(LOOKS[look])
    with zoo.Wide():
        compared(model.double(), {"x": X["x"].double()})


def test_kinds_of_layers_that_take_turns_are_traced_once_each() -> None:
    class Turns(Looks):
        def __init__(self) -> None:
            super().__init__(lambda m: 0.0, layers=9)
            for i, layer in enumerate(self.layers):
                layer.scale = (1.0, 1.0, 2.0)[i % 3]

    assert compared(Turns()) == 7


def test_lists_within_equal_layers() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(i) for i in range(4)])
            self.register_buffer("shift", torch.linspace(0, 1, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:
                x = block(x)
            return x + self.shift

    model = Looks(lambda m: 0.0)
    model.layers = nn.ModuleList([Outer() for _ in range(4)])
    assert compared(model) == 3 + 3


def test_layers_whose_weights_others_have_too() -> None:
    model = Looks(lambda m: 0.0)
    model.layers[3].fc.weight = model.first.weight
    assert compared(model) == 4


@pytest.mark.parametrize("place", ["before", "within", "behind", "between"])
def test_writes_in_place_that_go_from_layer_to_layer(place: str) -> None:
    class Within(Block):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            y = self.fc(x)
            y += x
            y[:, 0].mul_(2.0)
            return y

    class Writes(Looks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if place == "before":
                x[0] = 1.0
            for layer in self.layers:
                x = layer(x)
                if place == "between":
                    x.mul_(2.0)
            x = self.first(x)
            if place == "behind":
                x += 1.0
            return x.mean()

    model = Writes(lambda m: 0.0)
    if place == "within":
        model.layers = nn.ModuleList([Within(i) for i in range(5)])
    assert compared(model) == 4
