"""Write and read a compiled program on disk: readable Python, layouts, a manifest. No pickle.

manifest.json           format, versions, mesh, hashes of the other files, facts
spec.yaml               the spec that it was compiled from
layouts.json            parameters, buffers, inputs, buckets, in the notation of shardc.ir.placement, and all other
                        fields of a Program except graphs
single.py               the model as one device runs it
stage0.py               what every rank runs: its `forward` is exactly what runs after loading
stage0_forward.py, ...  the stage's forward and backward graphs, and pair_0_1.py, ... of overlapped stages
stage1.py, ...          of a pipeline: what the ranks of the other stages run
counts.py               sums over all microbatches that a step needs first, if there are any
schedule.txt            of a pipeline: who runs which stage when (shardc.runtime.schedule)
constants.safetensors   tensors that capture found in the code

rows writes and reads fields of the IR's dataclasses, emit writes the Python, parser reads it back, repeated_layers
finds lines to leave out when it is shown, model_source checks whether the user's code has changed since; this file
writes and reads the folder. A folder may come from anybody: folder_files reads its files, tables checks the two
tables, program_ops decides which ops its texts may call.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from shardc.artifact import emit, model_source
from shardc.artifact.folder_files import CONSTANTS, LAYOUTS, MANIFEST, SCHEDULE, SPEC, FolderFiles, digest
from shardc.artifact.parser import MissingOpError, Reader
from shardc.artifact.rows import form, row
from shardc.artifact.tables import Manifest, check, of_form
from shardc.errors import Errors, ShardcError
from shardc.ir.forward_record import ForwardRecord
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Pair, Stage
from shardc.ir.stored import Buffer
from shardc.runtime import schedule
from shardc.spec import Spec
from shardc.version import VERSION

FORMAT = 5


def write(program: Program, folder: str | Path) -> None:
    """Write a program to a folder, completely or not at all. An artifact in its place is replaced.

    Raises ShardcError for a folder that contains anything but an artifact. Constants are copied to the CPU.
    """
    written, folder = folder, Path(folder).resolve()
    check_free(folder, str(written))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        new, old = Path(work, "new"), Path(work, "old")
        new.mkdir()
        _write(program, new)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise


def check_free(folder: Path, shown: str) -> None:
    """Raise ShardcError unless the folder is new, empty or an artifact, which may be replaced."""
    fix = "name a new or empty folder"
    if not folder.exists():
        return
    present = {f.name for f in folder.iterdir()} if folder.is_dir() else {folder.name}
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"] if present else ()
        ours = {MANIFEST, "__pycache__", *listed}
    except (OSError, ValueError, KeyError, TypeError):
        raise ShardcError(f"{shown} exists and is not a shardc artifact", where=shown, fix=fix) from None
    if others := sorted(present - ours):
        fault = f"{shown} would be replaced, but contains files that are not the artifact's: {', '.join(others[:5])}"
        raise ShardcError(fault, where=shown, fix=f"move them, or {fix}")


def _write(program: Program, folder: Path) -> None:
    files = {f"{name}.py": emit.module(graph, program, f"{what}.") for name, graph, what, _ in emit.graphs(program)}
    if program.schedule is not None:
        files[SCHEDULE] = f"{program.schedule}\n"
    files[LAYOUTS] = json.dumps(row(program), indent=1, ensure_ascii=False)
    files[SPEC] = str(program.spec)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    # copies, as safetensors refuses tensors that share memory
    constants = {
        b.name: _reals(b.constant.detach()).to("cpu", copy=True).contiguous()
        for b in program.buffers
        if b.constant is not None
    }
    if constants:
        save_file(constants, folder / CONSTANTS)
    manifest = {
        "format": FORMAT,
        "shardc": VERSION,
        "torch": str(torch.__version__),
        "mesh": dict(program.mesh.axes),
        "record": program.record.to_json() if program.record is not None else None,
        "meta": program.meta | model_source.record(program.origins),
        "sha256": {f.name: digest(f) for f in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")


def read(folder: str | Path, *, trust: bool = False) -> Program:
    """Read a program that `write` wrote: see shardc.api.load."""
    files = FolderFiles(Path(folder), trust=trust)
    manifest = _manifest(files)
    where = files.path(LAYOUTS)
    program: Program = of_form(form(Program), files.table(LAYOUTS), where, context=manifest.mesh)
    check(program, where)
    program = replace(
        program,
        buffers=_with_constants(program, files),
        meta=manifest.meta.model_dump(exclude_unset=True),
        recorded=partial(ForwardRecord.read, manifest.record),
    )
    try:
        return _with_texts(program, files)
    except MissingOpError as e:
        e.meta = program.meta
        raise


def _manifest(files: FolderFiles) -> Manifest:
    """Read the manifest, and check that the files are those that it lists."""
    where, folder = files.path(MANIFEST), str(files.folder)
    values = files.table(MANIFEST)
    if not isinstance(values, dict) or not {"format", "torch", "sha256"} <= values.keys():
        fix = "make one with `shardc compile -o DIR`"
        raise ShardcError(f"{MANIFEST} is not the manifest of a shardc artifact", where=where, fix=fix)
    if values["format"] != FORMAT:
        fault = f"artifact of format {str(values['format'])[:20]}, this shardc reads {FORMAT}"
        raise ShardcError(fault, where=folder, fix="compile again")
    manifest: Manifest = of_form(Manifest, values, where)
    errors = Errors()
    then, now = (".".join(str(v).split(".")[:2]) for v in (manifest.torch, torch.__version__))
    if then != now and not files.trust:
        fault = f"compiled with torch {then}, but this is torch {now}, whose ops may differ"
        errors.add(fault, where=folder, fix="compile again, or load it with trust=True (--trust)")
    files.check(manifest.sha256, errors)
    errors.raise_any()
    return manifest


def _with_constants(program: Program, files: FolderFiles) -> tuple[Buffer, ...]:
    """Return the buffers with their constants. Raises ShardcError for a missing one or another type."""
    constants, buffers = files.constants(), []
    for b in program.buffers:
        x = _as(constants[b.name], b.dtype) if b.constant and b.name in constants else None
        if b.constant and (x is None or tuple(x.shape) != b.shape or x.dtype != b.dtype):
            raise files.wrong(CONSTANTS, f"the constant {b.name} is {'missing' if x is None else f'not {b.value}'}")
        buffers.append(replace(b, constant=x))
    return tuple(buffers)


def _with_texts(program: Program, files: FolderFiles) -> Program:
    """Return the program with its graphs, schedule and spec, read from their texts."""
    local = {x.name: x.value for x in program.stored}
    whole = {n: Value(v.shape, v.dtype, v.requires_grad) for n, v in local.items()}
    spec = Spec.parse(files.text(SPEC), files.path(SPEC))
    regions = {r.name for r in program.regions}
    unknown = spec.unknown_ops == "replicate"

    def graph(name: str, types: dict[str, Value], form: Any, **how: Any) -> fx.Graph:
        """Read a graph from its text. form: of what it returns; how: whether it is piped, or joint."""
        place = files.path(name)
        reader = Reader(files.text(name), program.mesh, types, place, regions=regions, unknown_ops=unknown, **how)
        parsed = reader.run()
        if not _has_form(parsed.output_node().args[0], form):
            raise files.wrong(name, "it does not return the loss, and what the tables list beside it")
        return parsed

    def joint_of(stage: str, forward: Any) -> Joint | None:
        if f"{stage}_forward.py" not in files:
            return None
        halves = [f"{stage}_{way}.py" for way in ("forward", "backward", "weights")]
        if f"{stage}.py" in files.edited and files.edited.isdisjoint(halves):
            fault = f"{stage}.py was edited, and {halves[0]} and {halves[1]}, which a training step runs, were not"
            raise ShardcError(fault, where=files.path(f"{stage}.py"), fix="edit all of them, or compile again")
        forms = [forward, ((), ANY), None] if halves[2] in files else [forward, ()]
        return Joint(*(graph(f, local, form, joint=True) for f, form in zip(halves, forms, strict=False)))

    beside = sum(b.updated for b in program.buffers) + len(program.outputs)
    program = replace(program, spec=spec, graph=graph("single.py", whole, (OPTIONAL, beside)))
    stages, forwards = [], []
    for i, stage in enumerate(program.stages):
        results = len(stage.updates) + len(stage.outputs) if program.axis else beside
        forwards.append((OPTIONAL, results, ANY, ANY))
        form_of_stage = (OPTIONAL, results, ANY) if program.axis else (OPTIONAL, results)
        code = graph(f"stage{i}.py", local, form_of_stage, piped=bool(program.axis))
        stages.append(replace(stage, graph=code, joint=joint_of(f"stage{i}", forwards[-1])))
    program = replace(program, stages=tuple(stages))
    giving = [s.name for s in stages if s.graph.output_node().args[0][0] is not None]  # type: ignore[index]
    if len(giving) != (not program.forward_only):
        expected = "no stage does: the model has none" if program.forward_only else "one stage does"
        raise files.wrong(MANIFEST, f"the loss is returned by {', '.join(giving) or 'no stage'}, and {expected}")
    if program.axis:
        text, most = files.text(SCHEDULE), 100 * (8 * len(stages) * program.microbatches + 100)
        if len(text) > most:  # an action has some ten characters, and each stage up to eight of a microbatch
            fault = f"it is longer than any of {len(stages)} stages and {program.microbatches} microbatches"
            raise files.wrong(SCHEDULE, fault)
        order = schedule.parse(text, files.path(SCHEDULE))
        if order.stages != len(stages) or order.microbatches != program.microbatches:
            raise files.wrong(SCHEDULE, f"it is for {order.stages} stages and {order.microbatches} microbatches")
        program = replace(program, schedule=order)
    alone: tuple[tuple[str, int, int], ...] = (("FB", 0, 0), ("FF", 0, 0))
    beside_each_other = program.schedule.pairs() if program.schedule is not None else alone
    pairs = []
    for p in (Pair(*each, fx.Graph()) for each in beside_each_other):
        if (file := f"{emit.pair_name(p)}.py") in files:
            if any(stages[s].joint is None for s in (p.first, p.then)):
                raise files.wrong(file, "its stages have no backward graph")
            both = forwards[p.first], forwards[p.then] if p.kind == "FF" else ()
            pairs.append(replace(p, graph=graph(file, local, both, joint=True)))
    program = replace(program, pairs=tuple(pairs))
    if "counts.py" in files:
        program = replace(program, prologue=Stage(graph("counts.py", local, ((), None)), "counts"))
    return program


#: In the form of a text's results: a value or None; any number of values.
OPTIONAL, ANY = "optional", -1


def _has_form(x: Any, form: Any) -> bool:
    """Return whether results have a form: a tuple of forms; (): any tuple; n: n values; None: anything."""
    if form is None:
        return True
    if form == OPTIONAL:
        return x is None or isinstance(x, fx.Node)
    if not isinstance(x, tuple):
        return False
    if isinstance(form, int):
        return form in (ANY, len(x)) and all(isinstance(y, fx.Node) for y in x)
    return not form or (len(x) == len(form) and all(map(_has_form, x, form)))


def _reals(x: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers, as safetensors does not support complex128."""
    return torch.view_as_real(x) if x.is_complex() else x


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_reals` if the program's dtype is complex."""
    return torch.view_as_complex(x) if dtype.is_complex and not x.is_complex() else x
