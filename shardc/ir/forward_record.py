"""What forward and loss were, in short: kept with a program and in its checkpoints, so that a run which goes on with
another forward, or with batches of other sizes, is told.

It is of the captured graph, before any pass: the same on every mesh and for every spec. Ops are counted by their
spelling, `dropout(p=0.1, train=True)`, with a line of the user's that they stand on; a digest says how they are
connected. Numbers that come from the batch's sizes stand in the ops, too: between batches of other sizes whole numbers
are not compared. Nor are the ops of another version of torch or shardc, which may spell the same model otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import source_of
from shardc.ir.program import Program
from shardc.ir.stored import Buffer
from shardc.version import VERSION

#: Bytes of a constant up to which its numbers count.
_CONSTANT = 1 << 20
#: Characters of an op's spelling, and ops that a note names.
_LONGEST, _NAMED = 200, 3
_WHOLE_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.])")
_CALL = re.compile(r"[\w.]+\([ -~]{0,1000}\)", re.ASCII)
_NEXT = re.compile(r", (?=\w+=)")
_DEVICES = ("device", "pin_memory", "layout", "memory_format")


@dataclass(frozen=True)
class ForwardRecord:
    """by: the versions that wrote it. inputs: {path in the batch: "f32[16, 8]"}, global. ops: {spelling: (how often,
    where first)}. exact, rough: digests of all ops and how they are connected, with and without whole numbers.
    """

    by: str
    inputs: dict[str, str]
    ops: dict[str, tuple[int, str]]
    exact: str
    rough: str

    @classmethod
    def later(cls, program: Program) -> Callable[[], ForwardRecord]:
        """The record of a program as it was captured, made when it is first asked for: the numbers of its constants are
        those of now.
        """
        constants = [_constant(b) for b in program.buffers if not b.fqn]
        return functools.cache(lambda: cls._of(program, constants))

    @classmethod
    def _of(cls, program: Program, constants: Sequence[str]) -> ForwardRecord:
        names = {p.name: p.fqn for p in program.params} | {b.name: b.fqn for b in program.buffers}
        names |= {x.name: _path(x.path) for x in program.inputs}
        called: dict[fx.Node, str] = {}
        ops: dict[str, tuple[int, str]] = {}
        exact, rough = hashlib.sha256(), hashlib.sha256()

        def note(spelling: str, line: str) -> None:
            count, where = ops.get(spelling, (0, line))
            ops[spelling] = count + 1, where
            exact.update(spelling.encode())
            rough.update(_rough(spelling).encode())

        for spelling in constants:
            note(spelling, "")
        for node in program.graph.nodes:
            if node.op == "placeholder":
                called[node] = names.get(node.name, node.name)
                continue
            called[node] = f"%{len(called)}"
            taken = [called[x] for x in _taken((node.args, node.kwargs))]
            if node.op == "call_function":
                note(_spelled(node), source_of(node).line)
            for digest in (exact, rough):
                digest.update(f"{taken}\n".encode())
        inputs = {_path(x.path): str(x.value) for x in program.inputs}
        return cls(_versions(), inputs, ops, exact.hexdigest()[:16], rough.hexdigest()[:16])

    @classmethod
    def read(cls, found: Any) -> ForwardRecord | None:
        """What `to_json` gave; None for anything else: a checkpoint may be anybody's."""
        if not isinstance(found, Mapping) or found.keys() != {f.name for f in fields(cls)}:
            return None
        inputs, ops = found["inputs"], found["ops"]
        if not isinstance(inputs, Mapping) or not isinstance(ops, Mapping):
            return None
        rows = list(ops.values())
        if not all(isinstance(row, (list, tuple)) and len(row) == 2 and type(row[0]) is int for row in rows):
            return None
        texts = [found["by"], found["exact"], found["rough"], *inputs, *inputs.values(), *(row[1] for row in rows)]
        if not all(isinstance(x, str) and x.isprintable() for x in texts) or not all(map(_CALL.fullmatch, ops)):
            return None
        counted = {spelling: (row[0], row[1]) for spelling, row in ops.items()}
        return cls(found["by"], dict(inputs), counted, found["exact"], found["rough"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, now: ForwardRecord) -> Iterator[str]:
        """What a run that goes on does otherwise than the one that wrote this; one line each."""
        if self.inputs != now.inputs:
            then, new = (
                ", ".join(f"{n} {x}" for n, x in a.items() if b.get(n) != x) or "nothing beside"
                for a, b in ((self.inputs, now.inputs), (now.inputs, self.inputs))
            )
            yield f"batch: the checkpoint was trained with {then}, and this run has {new}"
        if self.by != now.by:
            return
        sized = self.inputs == now.inputs
        if (self.exact, self.rough)[not sized] != (now.exact, now.rough)[not sized]:
            found = list(_changes(_counted(self.ops, sized=sized), _counted(now.ops, sized=sized)))
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            what = "; ".join(found[:_NAMED]) or "the same ops are connected otherwise"
            yield f"forward or loss differ from those that wrote the checkpoint: {what}{more}"


def _changes(then: dict[str, tuple[int, str]], now: dict[str, tuple[int, str]]) -> Iterator[str]:
    """What ops became others: those of one name, and one form, are told as one."""
    fewer = [x for x in then if then[x][0] > now.get(x, (0, ""))[0]]
    more = [x for x in now if now[x][0] > then.get(x, (0, ""))[0]]
    for old in fewer:
        name, at = old.partition("(")[0], then[old][1]
        new = next((x for x in more if x.partition("(")[0] == name and x not in then and old not in now), None)
        if new is None:
            counts = f" {now[old][0]} times, not {then[old][0]}" if old in now else " no longer"
            yield f"{old}{counts}, {at}" if at else f"{old}{counts}"
            continue
        more.remove(new)
        yield f"{now[new][1] or at}: {name} {_settings(old, new)}".removeprefix(": ")
    for new in more:
        counts = f" {now[new][0]} times, not {then[new][0]}" if new in then else " is new"
        yield f"{now[new][1]}: {new}{counts}".removeprefix(": ")


def _settings(old: str, new: str) -> str:
    """What of one op's arguments is another now."""
    each = (_NEXT.split(x[x.index("(") + 1 : -1]) for x in (old, new))
    then, now = ({name: x for name, _, x in (y.partition("=") for y in given)} for given in each)
    if then.keys() != now.keys():
        return f"was {old}, is {new}"
    return ", ".join(f"{name}: then {x}, now {now[name]}" for name, x in then.items() if now[name] != x)


def _counted(ops: Mapping[str, tuple[int, str]], *, sized: bool) -> dict[str, tuple[int, str]]:
    """sized: with whole numbers."""
    if sized:
        return dict(ops)
    found: dict[str, tuple[int, str]] = {}
    for spelling, (count, where) in ops.items():
        before, first = found.get(_rough(spelling), (0, where))
        found[_rough(spelling)] = before + count, first
    return found


def _rough(spelling: str) -> str:
    """Without whole numbers, and what constants hold: they may come from the batch's sizes."""
    return "constant" if spelling.startswith("constant(") else _WHOLE_NUMBER.sub("_", spelling.partition("#")[0])


def _spelled(node: fx.Node) -> str:
    """An op with those of its arguments that are no tensors: dropout(p=0.1, train=True)."""
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))
    name = re.sub(r"[^\w.]", "_", name, flags=re.ASCII)
    schema = getattr(node.target, "_schema", None)
    named = [a.name for a in schema.arguments] if schema is not None else []
    given = {named[i] if i < len(named) else f"arg{i}": x for i, x in enumerate(node.args)} | dict(node.kwargs)
    said = ", ".join(f"{n}={_said(x)}" for n, x in given.items() if n not in _DEVICES and not isinstance(x, fx.Node))
    text = f"{name}({said})"
    if len(text) > _LONGEST:  # a long list of sizes
        text = f"{text[:_LONGEST]}... #{hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text


def _taken(arguments: Any) -> list[fx.Node]:
    """The tensors among an op's arguments, in order, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found


def _said(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_said, x))}]"
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return "tensor" if isinstance(x, fx.Node) else str(x) if isinstance(x, (bool, int, float)) else ascii(x)


def _constant(b: Buffer) -> str:
    """A tensor that capture found in the code, by its numbers."""
    x, text = b.constant, str(b.value)
    if not isinstance(x, Tensor) or type(x) is not Tensor or x.device.type != "cpu" or x.nbytes > _CONSTANT:
        return f"constant(type={text})"
    numbers = hashlib.sha256(x.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
    return f"constant(type={text}, numbers={numbers})"


def _path(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path)) or "the batch"


def _versions() -> str:
    return f"shardc {VERSION}, torch {'.'.join(str(torch.__version__).split('.')[:2])}"
