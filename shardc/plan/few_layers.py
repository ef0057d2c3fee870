"""Capture the planned model for any number of rows and layers, each combination once.

Few of 126 equal layers are captured from a shallow copy of the model that has only these.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.ir.graph import calls, source_of
from shardc.ir.patterns import match
from shardc.ir.program import Program
from shardc.ir.repeats import layer_lists
from shardc.ir.types import op_name
from shardc.layer_names import layer_of, of_every_layer
from shardc.passes.annotate import model_plan
from shardc.plan.space import Facts, Layers
from shardc.runtime.data import inputs
from shardc.torch_private import pytree

#: Units of layers that show what each adds: stages of one (the first), one, two, and one (the last).
UNITS = 5


#: Attributes in which the layers of transformers keep their number.
_NUMBERS = ("layer_idx", "layer_id", "layer_index")
_PLAIN = (int, float, str, bool, tuple, type(None))
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Subject:
    """A model and an example batch."""

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    _short: dict[int, nn.Module] = field(default_factory=dict)
    _captured: dict[tuple[int, int | None, int | None], Program] = field(default_factory=dict)

    @cached_property
    def layers(self) -> Layers | None:
        """The model's list of repeated layers. None without one that is long enough to shorten.

        None, too, if the model cannot run with few of them, as one whose forward counts them.
        """
        self.layers = _repeated(self.model)
        try:
            self.captured(2, UNITS)
        except ShardcError:
            return None
        return self.layers

    def match_layers_alike(self, patterns: Set[str]) -> bool:
        """Return whether each pattern matches the same names in every layer: none selects single layers."""
        assert self.layers is not None
        names = [n for n, _ in (*self.model.named_modules(), *self.model.named_parameters())]
        matched: dict[tuple[int, str], set[frozenset[str]]] = {}  # by kind of layer and name in it
        for name in names:
            layer = layer_of(name)
            if layer is None or layer[0] != self.layers.name or int(layer[1]) < self.layers.first:
                continue
            kind = (int(layer[1]) - self.layers.first) % self.layers.period
            inside = name[len(".".join(filter(None, layer))) :]
            matched.setdefault((kind, inside), set()).add(frozenset(p for p in patterns if match(p, name)))
        return all(len(found) == 1 for found in matched.values())

    @property
    def rows(self) -> int:
        """The most common first dim of the inputs."""
        lengths = Counter(x.shape[0] for x in _leaves(self.batch) if x.dim())
        return lengths.most_common(1)[0][0]

    @property
    def sequence(self) -> int | None:
        """Dim 1 of int [batch, sequence] and float [batch, sequence, hidden] inputs; None if it differs."""
        lengths = {x.shape[1] for x in _leaves(self.batch) if x.dim() == (3 if x.is_floating_point() else 2)}
        return lengths.pop() if len(lengths) == 1 else None

    def example(self, rows: int, sequence: int | None = None) -> Any:
        """Build a batch like the example on the meta device, with other numbers of rows and tokens."""
        own_rows, own_length = self.rows, self.sequence

        def sized(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != own_rows:
                return x
            rest = [sequence if i == 0 and sequence and n == own_length else n for i, n in enumerate(x.shape[1:])]
            return torch.empty(rows, *rest, dtype=x.dtype, device="meta")

        return pytree.tree_map(sized, self.batch)

    def captured(self, rows: int, units: int | None = None, sequence: int | None = None) -> Program:
        """Return the captured program. units: of layers; None: all. Raises ShardcError as capture does."""
        key = rows, units, sequence
        if key not in self._captured:
            batch = self.example(rows, sequence)
            self._captured[key] = capture(self.model_of(units), batch, loss=self.loss, prove=False)
        return self._captured[key]

    def model_of(self, units: int | None) -> nn.Module:
        """Return the model with so many units of layers. None: all; also without a list of repeated layers."""
        if units is None or self.layers is None:
            return self.model
        if units not in self._short:
            keep = self.layers.first + units * self.layers.period
            self._short[units] = _shortened(self.model, self.layers.name, keep)
        return self._short[units]


def facts(subject: Subject) -> Facts:
    """Collect facts from the captured few-layer model for two rows. Raises ShardcError as capture does."""
    rows = 2
    program = subject.captured(rows, UNITS if subject.layers else None)
    lists = layer_lists(program)
    modules, number = experts(program)
    own = [x for x in program.inputs if not x.shape or x.shape[0] != rows]
    whole = [inputs.name_of(x.path) if x.path else x.name for x in own]  # inputs without rows
    first = next((p for p in subject.model.parameters() if p.is_floating_point()), None)
    return Facts(
        rows=subject.rows,
        sequence=subject.sequence,
        tokens=program.tokens and program.tokens // rows,
        inputs={**dict.fromkeys(whole), "*": 0} if whole else {},
        layers=subject.layers,
        dtype=str(first.dtype).removeprefix("torch.") if first is not None else "float32",
        number=number,
        cuts=subject.layers.number if subject.layers else max(sum(map(len, lists.values())), 1),
        shard={"use": "model" if model_plan.read(subject.model) else "structure"},
        regions=tuple(f"{name}.*" if name else "*" for name in lists),
        sequences=tuple(f"{name}.*" for name in lists if name and _hands_on(program, name)),
        experts=modules,
        encoders=encoders(list(lists)),
    )


def experts(program: Program) -> tuple[tuple[str, ...], int]:
    """Return patterns of the modules with experts, and the number of experts; ((), 0) without any."""
    nodes = [n for n in calls(program.graph) if op_name(n.target) == "experts"]
    stored = [x.meta["value"].shape for n in nodes for x in n.all_input_nodes if x.op == "placeholder"]
    modules = dict.fromkeys(of_every_layer(source_of(n).module) for n in nodes)
    return tuple(modules), max((shape[0] for shape in stored if len(shape) > 2), default=0)


def encoders(lists: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that contain an earlier list of layers, but not the last list.

    >>> encoders(["vision.blocks", "text.model.layers"]), encoders(["layers"])
    (('vision',), ())
    """
    found = dict[str, None]()
    last = lists[-1].split(".") if lists else []
    for name in lists[:-1]:
        path = name.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(path, last, strict=False)) if a != b), len(path))
        if shared < len(path) - 1:
            found[".".join(path[: shared + 1])] = None
    return tuple(found)


def _hands_on(program: Program, name: str) -> bool:
    """Return whether the layers of a list return [batch, sequence, hidden]: dim 1 can be split between them."""
    long = {n for x in program.inputs for n in x.shape[1:2]}
    last: dict[str, fx.Node] = {}
    for n in program.graph.nodes:
        module = source_of(n).module
        if n.op == "call_function" and module.startswith(f"{name}.") and n.meta.get("value") is not None:
            last[module.removeprefix(f"{name}.").partition(".")[0]] = n
    shapes: list[tuple[int, ...]] = [getattr(n.meta["value"], "shape", ()) for n in last.values()]
    return bool(shapes) and all(len(s) == 3 and s[1] in long for s in shapes)


# --- equal layers, recognized by their modules before anything is captured


def _repeated(model: nn.Module) -> Layers | None:
    """Find the model's list of repeated layers.

    None unless there is one outermost list with more than UNITS periods. Takes the pattern that keeps fewest layers.
    """
    lists = [
        (name, m)
        for name, m in model.named_modules(remove_duplicate=False)
        if layer_of(name) is None and len(m._modules) > 1 and all(map(str.isdigit, m._modules))
    ]
    if len(lists) != 1:
        return None
    name, longest = lists[0]
    signs = [_signature(m) for m in longest.children()]
    n = len(signs)
    short = sorted(
        (first + UNITS * period, first, period)
        for period in range(1, n // UNITS + 1)
        for first in range(n - UNITS * period)
    )
    for _, first, period in short:
        if all(signs[i] == signs[i + period] for i in range(first, n - period)):
            return Layers(name, n, first, period)
    return None


def _signature(layer: nn.Module) -> object:
    """Return a value that is equal for layers that differ only in their number."""

    def plain(m: nn.Module) -> str:
        return repr(sorted((k, v) for k, v in vars(m).items() if isinstance(v, _PLAIN) and k not in _NUMBERS))

    tensors = [(n, x.shape, x.dtype) for n, x in (*layer.named_parameters(), *layer.named_buffers())]
    return [(name, type(m), plain(m)) for name, m in layer.named_modules()], tensors


def _shortened(model: nn.Module, name: str, keep: int) -> nn.Module:
    """Return the model with the first `keep` layers of a list: its parents are copied, the rest is shared."""
    short = copy.copy(model)
    short._modules = dict(model._modules)
    if not name:
        short._modules = dict(list(short._modules.items())[:keep])
        return short
    head, _, rest = name.partition(".")
    child = model._modules[head]
    assert child is not None
    short._modules[head] = _shortened(child, rest, keep)
    return short


def _leaves(batch: Any) -> list[Tensor]:
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    if not tensors or not any(x.dim() for x in tensors):
        fix = "give a dict (keyword arguments), a tuple or a tensor"
        raise ShardcError("the batch has no tensor with rows", fix=fix)
    return tensors
