"""Record what forward and loss compute, to warn a run that resumes with different ones.

The record is of the captured graph, before any pass: it is the same on every mesh and for every spec. It counts ops by
their spelling, `dropout(p=0.1, train=True)`, and a digest says how they are connected. Ops also contain numbers that
come from the batch's sizes. So ops are compared only between batches of equal sizes, and only if the same versions of
torch and shardc wrote both records.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.program import Program
from shardc.ir.stored import Buffer
from shardc.version import VERSION

#: Constants of at most this many bytes are compared by their numbers.
_CONSTANT = 1 << 20
#: Maximum characters of an op's spelling, and maximum ops that a note names.
_LONGEST, _NAMED = 200, 3
_CALL = re.compile(r"[\w.]+\([ -~]{0,1000}\)", re.ASCII)
_DEVICES = ("device", "pin_memory", "layout", "memory_format")


@dataclass(frozen=True)
class ForwardRecord:
    """A record. by: the versions that wrote it. inputs: {path in the batch: "f32[16, 8]"}, global.

    ops: {spelling: how often}. digest: of all ops and how they are connected.
    """

    by: str
    inputs: dict[str, str]
    ops: dict[str, int]
    digest: str

    @classmethod
    def later(cls, program: Program) -> Callable[[], ForwardRecord]:
        """Return a cached function that makes a program's record, with its constants' values as of now."""
        constants = [_constant(b) for b in program.buffers if not b.fqn]
        return functools.cache(lambda: cls._of(program, constants))

    @classmethod
    def _of(cls, program: Program, constants: Sequence[str]) -> ForwardRecord:
        names = {p.name: p.fqn for p in program.params} | {b.name: b.fqn for b in program.buffers}
        names |= {x.name: _path(x.path) for x in program.inputs}
        called: dict[fx.Node, str] = {}
        ops, digest = Counter(constants), hashlib.sha256("".join(constants).encode())
        for node in program.graph.nodes:
            if node.op == "placeholder":
                called[node] = names.get(node.name, node.name)
                continue
            called[node] = f"%{len(called)}"
            if node.op == "call_function":
                ops[spelling := _spelled(node)] += 1
                digest.update(spelling.encode())
            digest.update(f"{[called[x] for x in _tensors((node.args, node.kwargs))]}\n".encode())
        inputs = {_path(x.path): str(x.value) for x in program.inputs}
        return cls(_versions(), inputs, dict(ops), digest.hexdigest()[:16])

    @classmethod
    def read(cls, json: Any) -> ForwardRecord | None:
        """Read what `to_json` returned; None for anything else, as a checkpoint can come from anywhere."""
        if not isinstance(json, Mapping) or json.keys() != {f.name for f in fields(cls)}:
            return None
        inputs, ops = json["inputs"], json["ops"]
        if not isinstance(inputs, Mapping) or not isinstance(ops, Mapping):
            return None
        texts = [json["by"], json["digest"], *inputs, *inputs.values()]
        if not all(isinstance(x, str) and x.isprintable() for x in texts):
            return None
        if not all(type(n) is int and _CALL.fullmatch(op) for op, n in ops.items()):
            return None
        return cls(json["by"], dict(inputs), dict(ops), json["digest"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, now: ForwardRecord) -> Iterator[str]:
        """Yield a line for each difference between a resumed run (`now`) and the run that wrote this record."""
        if self.inputs != now.inputs:
            then, new = (
                ", ".join(f"{n} {x}" for n, x in a.items() if b.get(n) != x) or "nothing beside"
                for a, b in ((self.inputs, now.inputs), (now.inputs, self.inputs))
            )
            yield f"batch: the checkpoint was trained with {then}, and this run has {new}"
        elif self.by == now.by and self.digest != now.digest:
            before, after = Counter(self.ops), Counter(now.ops)
            changes = [f"{n} fewer {op}" for op, n in (before - after).items()]
            changes += [f"{n} more {op}" for op, n in (after - before).items()]
            more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
            shown = "; ".join(changes[:_NAMED]) or "the same ops are connected in another way"
            yield f"forward or loss differ from those that wrote the checkpoint: {shown}{more}"


def _spelled(node: fx.Node) -> str:
    """Spell an op with its arguments that are not tensors: dropout(p=0.1, train=True)."""
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))
    name = re.sub(r"[^\w.]", "_", name, flags=re.ASCII)
    schema = getattr(node.target, "_schema", None)
    named = [a.name for a in schema.arguments] if schema is not None else []
    values = {named[i] if i < len(named) else f"arg{i}": x for i, x in enumerate(node.args)} | dict(node.kwargs)
    shown = ", ".join(f"{n}={_text(x)}" for n, x in values.items() if n not in _DEVICES and not isinstance(x, fx.Node))
    text = f"{name}({shown})"
    if len(text) > _LONGEST:  # a long list of sizes
        text = f"{text[:_LONGEST]}... #{hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text


def _tensors(arguments: Any) -> list[fx.Node]:
    """Return the tensors among an op's arguments, in order, with repeats."""
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, nodes.append)
    return nodes


def _text(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_text, x))}]"
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return "tensor" if isinstance(x, fx.Node) else str(x) if isinstance(x, (bool, int, float)) else ascii(x)


def _constant(b: Buffer) -> str:
    """Spell a tensor that capture found in the code, by a digest of its numbers."""
    x, text = b.constant, str(b.value)
    if not isinstance(x, Tensor) or type(x) is not Tensor or x.device.type != "cpu" or x.nbytes > _CONSTANT:
        return f"constant(type={text})"
    numbers = hashlib.sha256(x.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
    return f"constant(type={text}, numbers={numbers})"


def _path(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path)) or "the batch"


def _versions() -> str:
    return f"shardc {VERSION}, torch {'.'.join(str(torch.__version__).split('.')[:2])}"
