"""Read the sharding spec, a frozen `Spec`, from YAML or a dict; report all mistakes with their places.

yaml_reader.py   text -> values and the places of each     explain.py         errors of the grammar -> where, what, fix
schema.py        the grammar of a whole spec               check.py           axes, sizes
fields.py        kinds of values, such as an axis          model_names.py     patterns against the names of a model
                                                           foreign_words.py   words of other libraries, as hints

The grammar of the sections:
shard_section.py       shard, activations, outputs         batch_section.py       batch
data_section.py        data: gradients, ZeRO, offload      step_sections.py       pipeline, checkpoint, loss, execution
module_sections.py     experts                             precision_section.py   precision, 8-bit products
run_section.py         run, how `shardc run` trains        optimizer_section.py   optimizer, learning rates
Optional features add theirs: shardc.features.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardc import text_file
from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.similar_names import nearest
from shardc.spec import yaml_reader
from shardc.spec.batch_section import Batch
from shardc.spec.check import Check, data_axes, resolve_mesh, token_axes
from shardc.spec.data_section import Data
from shardc.spec.explain import check_form
from shardc.spec.fields import Section
from shardc.spec.model_names import Names
from shardc.spec.module_sections import Expert
from shardc.spec.optimizer_section import Optimizer
from shardc.spec.precision_section import Precision
from shardc.spec.run_section import Run
from shardc.spec.schema import Form, On, whole_form
from shardc.spec.shard_section import DimShard, Style, Use
from shardc.spec.step_sections import Checkpoint, Execution, Loss, Pipeline
from shardc.spec.yaml_reader import Document, Places, say

__all__ = [
    "ActivationRule",
    "Batch",
    "Checkpoint",
    "Data",
    "DimShard",
    "Execution",
    "Expert",
    "Loss",
    "On",
    "Optimizer",
    "OutputRule",
    "Pipeline",
    "Precision",
    "Run",
    "ShardRule",
    "Spec",
    "Style",
]


@dataclass(frozen=True)
class ShardRule:
    """How a pattern's weights are split: by a style word over `axis`, or (style None) by dims.

    dims: tensor dim -> the axes that split it, outermost first.
    """

    pattern: str
    style: Style | None
    axis: str = "tp"
    dims: dict[int, tuple[DimShard, ...]] | None = None

    def to_plain(self) -> Any:
        """Return the entry that follows the pattern in a spec, as plain values."""
        if self.dims is not None:
            return _dims(self.dims)
        return self.style if self.axis == "tp" else {"style": self.style, "axis": self.axis}


@dataclass(frozen=True)
class ActivationRule:
    """How the outputs (or inputs) of a pattern's modules are split."""

    pattern: str
    at: Literal["output", "input"]
    dims: dict[int, tuple[DimShard, ...]]


@dataclass(frozen=True)
class OutputRule:
    """How a pattern's outputs are returned. dims: tensor dim -> the axes that split it; None: whole."""

    pattern: str
    dims: dict[int, tuple[DimShard, ...]] | None


@dataclass(frozen=True)
class Spec:
    """A valid spec; whether it fits a model is checked later. Equality ignores the places of keys.

    mesh: every size known. shard, activations: in the order written: the first match wins. shard_use: the plan that
    splits the other weights, over the axis shard_axis. sections: of optional features, by name, those that are written.
    file, text: the source; "" for a dict.
    """

    mesh: Mesh
    device: On | None = None
    batch: Batch = field(default_factory=Batch)
    shard: tuple[ShardRule, ...] = ()
    shard_use: Use | None = None
    shard_axis: str = "tp"
    activations: tuple[ActivationRule, ...] = ()
    outputs: tuple[OutputRule, ...] = ()
    pipeline: Pipeline | None = None
    data: Data = field(default_factory=Data)
    experts: tuple[Expert, ...] = ()
    checkpoint: tuple[Checkpoint, ...] = ()
    loss: Loss = field(default_factory=Loss)
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer, hash=False)
    execution: Execution = field(default_factory=Execution)
    run: Run = field(default_factory=Run)
    batch_norm: Literal["sync", "local"] = "sync"
    unknown_ops: Literal["error", "replicate"] = "error"
    uneven: Literal["error", "pad"] = "error"
    strict: bool = False
    sections: Mapping[str, Any] = field(default_factory=dict, hash=False)
    places: Places = field(default_factory=Places, compare=False, repr=False)
    file: str = field(default="", compare=False, repr=False)
    text: str = field(default="", compare=False, repr=False)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | Spec,
        *,
        mesh: Mapping[str, int] | None = None,
        overrides: Iterable[str] = (),
        world: int | None = None,
        names: Names | None = None,
    ) -> Spec:
        """Read a spec from a path, a dict or another Spec.

        mesh: sizes instead of the spec's (`--mesh`). overrides: settings such as "data.zero=3" (`--set`), checked like
        the rest. world: number of ranks, if known: it sets a size of -1, and must be the number that the mesh needs.
        names: of the model; if the spec has mistakes, patterns that match none of them are reported too. Raises
        ShardcError with every mistake.
        """
        if isinstance(source, Spec):
            document = Document(source.to_dict(), Places(dict(source.places.keys), dict(source.places.values)))
            spec = cls._of(document, Errors(), mesh, overrides, world, names)
            return replace(spec, file=source.file, text=source.text)
        if isinstance(source, Mapping):
            document = Document(yaml_reader.of_mapping(source), Places())
        else:
            return cls.parse(_text(source), os.fspath(source), mesh=mesh, overrides=overrides, world=world, names=names)
        return cls._of(document, Errors(), mesh, overrides, world, names)

    @classmethod
    def parse(
        cls,
        text: str,
        file: str = "spec",
        *,
        mesh: Mapping[str, int] | None = None,
        overrides: Iterable[str] = (),
        world: int | None = None,
        names: Names | None = None,
    ) -> Spec:
        """Read a spec from YAML text; `file` is its name in errors. The other arguments are as in `load`."""
        errors = Errors()
        try:
            document = yaml_reader.read(text, file, errors)
        except ShardcError as fatal:
            errors.found.extend(fatal.errors)
            errors.raise_any()
            raise
        return replace(cls._of(document, errors, mesh, overrides, world, names), file=file, text=text)

    @classmethod
    def _of(
        cls,
        document: Document,
        errors: Errors,
        mesh: Mapping[str, int] | None,
        overrides: Iterable[str],
        world: int | None,
        names: Names | None,
    ) -> Spec:
        _check_arguments(mesh, overrides, world)
        places = document.places
        if document.value is None:
            document = Document({}, places, document.broken)
        if not isinstance(document.value, dict):
            fault = f"a spec is a mapping of sections, not {say(document.value)}"
            errors.add(fault, where=places.where(()), fix="begin with `shardc: 1`")
            errors.raise_any()
        for setting in overrides:
            yaml_reader.override(document, setting, errors)
        for axis, size in (mesh or {}).items():
            with errors.collect():
                _resize(document, axis, size)
        for section in [s for s, v in document.value.items() if v is None and s != "shardc"]:
            del document.value[section]  # an empty section counts as absent
        form, cut = check_form(document, errors)
        axes = tuple(form.mesh)
        resolved = None
        if not any(path[:1] == ("mesh",) for path in cut):
            resolved = resolve_mesh(form.mesh, world, places, errors)
        elif ("mesh",) in cut:
            axes = ()
        if ("mesh",) not in cut:
            Check(form, document.value, axes, resolved, places, errors).run()
        if errors.found and names is not None:
            names.check(form, places, errors)
        errors.found.sort(key=lambda e: _line(e.where))
        errors.raise_any()
        assert resolved is not None
        return cls._build(form, resolved, places)

    @classmethod
    def _build(cls, form: Form, mesh: Mesh, places: Places) -> Spec:
        def boundary(key: str, dims: dict[int, tuple[DimShard, ...]]) -> ActivationRule:
            return ActivationRule(key.removesuffix(":in"), "input" if key.endswith(":in") else "output", dims)

        return cls(
            mesh=mesh,
            shard=tuple(ShardRule(p, r.style, r.axis or "tp", r.dims) for p, r in form.shard.rules.items()),
            shard_use=form.shard.use.plan if form.shard.use else None,
            shard_axis=(form.shard.use and form.shard.use.axis) or "tp",
            activations=tuple(boundary(key, dims) for key, dims in form.activations.items()),
            outputs=tuple(OutputRule(name, dims) for name, dims in form.outputs.items()),
            sections={
                n: x for n, x in form if n not in Form.model_fields and x != whole_form().model_fields[n].default
            },
            places=places,
            **{n: getattr(form, n) for n in _SECTIONS},
        )

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that split the batch: batch.axes if set, else those of `check.data_axes` and expert_axes."""
        axes = data_axes(self.batch, self.data, self.mesh.names, self.token_axes)
        if self.batch.axes is not None:
            return axes
        return tuple(n for n in self.mesh.names if n in axes or n in self.expert_axes)

    @property
    def data_ranks(self) -> int:
        """The number of parts into which ranks split the batch."""
        return math.prod(map(self.mesh.size, self.data_axes))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split each row of inputs, outermost first (shardc.features.sequence)."""
        return tuple(token_axes(self.sections))

    @property
    def token_ranks(self) -> int:
        """The number of parts into which ranks split each row."""
        return math.prod(map(self.mesh.size, self.token_axes))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that only experts use: no other section names them."""
        return tuple(dict.fromkeys(e.axis for e in self.experts if e.axis not in self.named_axes))

    @property
    def named_axes(self) -> frozenset[str]:
        """The axes that sections name, except those of the batch and of experts."""
        axes = {r.axis for r in self.shard if r.dims is None and r.style != "replicate"}
        entries = [
            *(r.dims or {} for r in self.shard),
            *(r.dims for r in self.activations),
            *(r.dims or {} for r in self.outputs),
        ]
        axes |= {s.axis for dims in entries for shards in dims.values() for s in shards}
        axes |= {self.shard_axis} if self.shard_use else set()
        axes |= {*self.token_axes, *([self.pipeline.axis] if self.pipeline else [])}
        return frozenset(axes)

    def where(self, path: tuple[str | int, ...]) -> str:
        """Return the place of a key, "spec.yaml:7:3", or of its nearest parent; for a dict `spec: KEY`."""
        return self.places.where(path)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain values, without defaults. `Spec.load` of them returns an equal spec."""
        out: dict[str, Any] = {"shardc": 1, "mesh": dict(self.mesh.axes)}
        shard: dict[str, Any] = {}
        if self.shard_use:
            shard["use"] = (
                self.shard_use if self.shard_axis == "tp" else {"plan": self.shard_use, "axis": self.shard_axis}
            )
        for r in self.shard:
            shard[r.pattern] = r.to_plain()
        parts = {n: _plain(x) for n, x in ({n: getattr(self, n) for n in _SECTIONS} | dict(self.sections)).items()}
        parts["shard"] = shard
        parts["activations"] = {r.pattern + (":in" if r.at == "input" else ""): _dims(r.dims) for r in self.activations}
        parts["outputs"] = {r.pattern: "whole" if r.dims is None else _dims(r.dims) for r in self.outputs}
        named: dict[str, Any] = {"shard": {}, "activations": {}, "outputs": {}}
        fields = whole_form().model_fields
        defaults = {n: _plain(f.default) for n, f in fields.items()} | named
        return out | {n: parts[n] for n in fields if n in parts and parts[n] != defaults[n]}

    def __repr__(self) -> str:
        sections = ", ".join(line.partition(":")[0] for line in str(self).splitlines() if line[:1].isalpha())
        return f"<Spec of {self.mesh}: {sections}>"

    def __str__(self) -> str:
        """Return YAML that loads to an equal spec."""
        parts: list[str] = []
        line = ""  # one-line sections follow each other; the others are separated by an empty line
        for name, value in self.to_dict().items():
            if isinstance(value, list):
                parts += [line, f"{name}:\n" + "".join(f"  - {yaml_reader.flow(v)}\n" for v in value)]
                line = ""
            elif name in ("batch", "shard", "activations", "outputs", "sequence", "pipeline", "data"):
                parts += [
                    line,
                    f"{name}:\n"
                    + "".join(f"  {yaml_reader.flow(k)}: {yaml_reader.flow(v)}\n" for k, v in value.items()),
                ]
                line = ""
            else:
                line += f"{name}: {yaml_reader.flow(value)}\n"
        return "\n".join(p for p in (*parts, line) if p)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """Return a JSON Schema (draft 2020-12) of the format, for editors."""
        schema = _tidy(whole_form().model_json_schema())
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **schema,
            "title": "shardc sharding spec, version 1",
        }


#: The sections whose form is a field of Spec.
_SECTIONS = tuple(n for n in Form.model_fields if n not in ("shardc", "mesh", "shard", "activations", "outputs"))


def _tidy(schema: Any) -> Any:
    """Remove titles that pydantic derives from field names, and defaults that cannot be written."""
    if isinstance(schema, dict):
        odd = {
            k for k, v in schema.items() if k == "title" or (k == "default" and not isinstance(v, (str, int, float)))
        }
        return {k: _tidy(v) for k, v in schema.items() if k not in odd}
    return [_tidy(v) for v in schema] if isinstance(schema, list) else schema


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return _with_keys(value.model_dump(mode="json", exclude_defaults=True), value.model_dump(exclude_defaults=True))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _with_keys(plain: Any, value: Any) -> Any:
    """Return plain values with the keys of others that are equal: JSON makes text of numbers."""
    if isinstance(plain, dict) and isinstance(value, dict):
        return {k: _with_keys(plain[str(k)], v) for k, v in value.items()}
    return plain


def _dims(dims: dict[int, tuple[DimShard, ...]]) -> dict[int, Any]:
    def one(s: DimShard) -> Any:
        return s.axis if s == DimShard(axis=s.axis) else s.model_dump(mode="json", exclude_defaults=True)

    return {d: one(s[0]) if len(s) == 1 else [one(x) for x in s] for d, s in dims.items()}


def _check_arguments(mesh: object, overrides: object, world: object) -> None:
    """Raise ShardcError for a mesh, overrides or world of the wrong type (text would be read by letter)."""
    errors = Errors()
    if world is not None and (isinstance(world, bool) or not isinstance(world, int)):
        errors.add(f"world is {say(world)}, not the number of ranks", where="world", fix="a whole number, such as 4")
    if mesh is not None and not isinstance(mesh, Mapping):
        errors.add(f"mesh is {say(mesh)}, not a mapping from axis to size", where="mesh", fix='e.g. mesh={"dp": 2}')
    if isinstance(overrides, (str, Mapping)) or not isinstance(overrides, Iterable):
        fault = f"overrides is {say(overrides)}, not a list or tuple of texts"
        errors.add(fault, where="overrides", fix="e.g. overrides=('data.zero=3',)")
    else:
        for setting in (x for x in overrides if not isinstance(x, str)):
            errors.add(f"an override is a text, not {say(setting)}", where="overrides", fix="e.g. 'data.zero=3'")
    errors.raise_any()


def _resize(document: Document, axis: str, size: object) -> None:
    """Set the size of a mesh axis. A spec without a mesh takes any axis."""
    where, sizes = f"--mesh {axis}={size}", document.value.get("mesh")
    written = isinstance(sizes, dict) and not all(
        document.places.where(("mesh", a)).startswith("--mesh") for a in sizes
    )
    if written and axis not in sizes:
        close = nearest(axis, sizes)
        fix = (f"did you mean {close!r}? " if close else "") + f"its axes are {', '.join(map(str, sizes))}"
        raise ShardcError(f"the spec's mesh has no axis {axis!r}", where=where, fix=fix)
    yaml_reader.put(document, ("mesh", axis), size, where)


def _line(where: str) -> tuple[int, int]:
    """Return line and column of a place; places without them are last."""
    position = re.search(r":(\d+):(\d+)$", where)
    return (int(position[1]), int(position[2])) if position else (sys.maxsize, 0)


def _text(source: object) -> str:
    """Read the text of a spec file. Raises ShardcError if the path is wrong."""
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        raise ShardcError(f"a spec is a path, a dict or a Spec, not a {kind}", where="spec", fix='e.g. "spec.yaml"')
    if "\n" in str(source) or ": " in str(source):
        fault = "this is the text of a spec, not its path"
        raise ShardcError(fault, where="spec", fix="give a path, or a mapping: yaml.safe_load(text)")
    file = Path(source)
    if file.suffix == ".py":
        fix = "give the path of a YAML file; on the command line the model comes first: shardc ... model.py spec.yaml"
        raise ShardcError("a spec is YAML, not Python", where=str(source), fix=fix)
    if os.path.isdir(file):
        yaml = sorted(p.name for p in file.glob("*.y*ml"))
        fix = f"give a file, such as {str(file / yaml[0])!r}" if yaml else "give the path of a YAML file"
        if os.path.exists(file / "manifest.json"):
            fix = f"a compiled folder is already a program: shardc.load({str(file)!r}); its spec is spec.yaml in it"
        raise ShardcError("this is a folder, not the path of a spec", where=str(source), fix=fix)
    if os.path.exists(file):  # Path.exists raises for a null byte
        return text_file.read(file, "spec", fix="give the path of a YAML file")
    near = nearest(file.name, [p.name for p in file.parent.glob("*.y*ml")]) if os.path.isdir(file.parent) else ""
    fix = f"did you mean {str(file.with_name(near))!r}?" if near else "give the path of a YAML file"
    raise ShardcError("this spec file does not exist", where=str(source), fix=fix)
