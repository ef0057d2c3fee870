"""A compiled program on disk: readable Python, layouts, a manifest. No pickle.

manifest.json           format, versions, mesh, hashes of the other files, notes, facts
spec.yaml               the spec that it was compiled from
layouts.json            parameters, buffers, inputs, buckets, in the notation of shardc.ir.placement
single.py               the model as one device runs it
stage0.py               what every rank runs: `forward` in it is exactly what runs after loading
stage1.py, ...          of a pipeline: what the ranks of the other stages run
counts.py               sums over all microbatches that a step needs before they run, if there are any
schedule.txt            of a pipeline: who runs which stage when (shardc.runtime.schedule)
constants.safetensors   tensors that capture found in the code

emit writes the Python, parser reads it back, repeated_layers says which of its lines can be left out when it is shown,
model_source whether the user's code is still that of which the folder was compiled; this file writes and reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from shardc.artifact import emit, model_source
from shardc.artifact.parser import graph_of
from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.outputs import Output
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Bucket, Buffer, Input, Lowered, OffloadPlaces, Param, Program, Region, Stage, Value
from shardc.ir.type_text import parse, show
from shardc.runtime import schedule
from shardc.spec import Spec

FORMAT = 1
MANIFEST, LAYOUTS, SPEC, CONSTANTS, SCHEDULE = (
    "manifest.json",
    "layouts.json",
    "spec.yaml",
    "constants.safetensors",
    "schedule.txt",
)


def save(program: Program, folder: str | Path) -> None:
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
    """Raises ShardcError unless the folder is new, empty or an artifact, which may be replaced."""
    fix = "name a new or empty folder"
    if not folder.exists():
        return
    present = {f.name for f in folder.iterdir()} if folder.is_dir() else {folder.name}
    try:
        ours = (
            {MANIFEST, "__pycache__", *json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]}
            if present
            else set()
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise ShardcError(f"{shown} exists and is not a shardc artifact", where=shown, fix=fix) from None
    if others := sorted(present - ours):
        what = f"{shown} would be replaced, but contains files that are not the artifact's: {', '.join(others[:5])}"
        raise ShardcError(what, where=shown, fix=f"move them, or {fix}")


def _write(program: Program, folder: Path) -> None:
    files = {"single.py": emit.module(program.graph, program, "The model as one device runs it.")}
    for i, stage in enumerate(program.stages):
        files[f"stage{i}.py"] = emit.module(
            stage.graph, program, f"{stage.name}: what {emit.who(program, i)} of {program.mesh} runs."
        )
        if stage.lowered is not None:
            for way, graph in stage.lowered.texts.items():
                doc = f"{stage.name}, {way} of a training step. Types are those of one rank."
                files[f"stage{i}_{way}.py"] = emit.module(graph, program, doc)
    if program.prologue is not None:
        files["counts.py"] = emit.module(
            program.prologue.graph, program, "Sums over all microbatches that a step needs before they run."
        )
    if program.schedule is not None:
        files[SCHEDULE] = f"{program.schedule}\n"
    files[LAYOUTS] = json.dumps(_layouts(program), indent=1, ensure_ascii=False)
    if program.spec is not None:
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
        "shardc": version("shardc"),
        "torch": str(torch.__version__),
        "mesh": dict(program.mesh.axes),
        "stages": [{"name": s.name, "updates": s.updates, "outputs": s.outputs} for s in program.stages],
        "axis": program.axis,
        "notes": list(program.notes),
        "shared_modules": program.shared_modules,
        "loss_scale": program.loss_scale,
        "evaluates": program.evaluates,
        "eval_mode": program.eval_mode,
        "still": program.still,
        "baked": program.baked,
        "offload": asdict(program.offload),
        "meta": program.meta | model_source.record(program.origins),
        "sha256": {f.name: _hash(f) for f in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _layouts(program: Program) -> dict[str, Any]:
    def named(x: Param | Buffer | Input | Output) -> dict[str, Any]:
        return {"name": x.name, "type": show(x.shape, x.dtype, x.layout)}

    return {
        "params": [
            {
                **named(p),
                "fqn": p.fqn,
                "aliases": p.aliases,
                "members": p.members,
                "trained": p.requires_grad,
                "reduce": p.reduce,
                "order": p.order,
                "bucket": p.bucket,
                "stages": p.stages,
            }
            for p in program.params
        ],
        "buffers": [
            {
                **named(b),
                "fqn": b.fqn,
                "aliases": b.aliases,
                "updated": b.updated,
                "adds": b.adds,
                "persistent": b.persistent,
                "constant": b.constant is not None,
                "stages": b.stages,
            }
            for b in program.buffers
        ],
        "microbatches": program.microbatches,
        "inputs": [{**named(i), "path": i.path, "microbatch": _cut(i.microbatch)} for i in program.inputs],
        "outputs": [
            {
                **named(o),
                "microbatch": _cut(o.microbatch),
                "adds": o.adds,
                "divisor": o.divisor,
                "stage": o.stage,
            }
            for o in program.outputs
        ],
        "buckets": [
            {
                "axes": b.axes,
                "dtype": str(b.dtype),
                "params": b.params,
                "shard": b.shard,
                "zero": b.zero,
                "compute": str(b.compute) if b.compute else None,
                "prefetch": b.prefetch,
                "stages": b.stages,
                "late": b.late,
                "keep": b.keep,
            }
            for b in program.buckets
        ],
        "regions": [asdict(r) for r in program.regions],
    }


def load(folder: str | Path, *, trust: bool = False, as_compiled: bool = False) -> Program:
    """Read a program that `save` wrote. Nothing that is read is executed.

    trust: accept files that were edited since, and artifacts of another torch. as_compiled: do not look whether the
    source of forward and loss changed since, which is a note on the first rank's stderr.
    Raises ShardcError for a folder that is not an artifact, is damaged or edited, or is of another version; all damaged
    files at once.
    """
    folder = Path(folder)
    manifest = _manifest(folder, trust)
    try:
        program = _tables(folder, manifest)
        stages = [(str(s["name"]), tuple(s["updates"]), tuple(s.get("outputs", ()))) for s in manifest["stages"]]
        program.axis = str(manifest["axis"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:  # edited tables: shardc writes every entry
        what = f"the artifact's tables cannot be read: {type(e).__name__}: {e}"
        raise ShardcError(
            what, where=str(folder), fix=f"undo the changes in {LAYOUTS} and {MANIFEST}, or compile again"
        ) from e
    local = {x.name: x.value for x in program.stored}
    whole = {n: Value(v.shape, v.dtype, v.requires_grad) for n, v in local.items()}

    def graph(name: str, types: dict[str, Value], **kind: bool) -> fx.Graph:
        return graph_of((folder / name).read_text(encoding="utf-8"), program.mesh, types, str(folder / name), **kind)

    def lowered(stage: str) -> Lowered | None:
        if f"{stage}_forward.py" not in manifest["sha256"]:
            return None
        files = [f"{stage}_{way}.py" for way in ("forward", "backward", "weights")]
        return Lowered(*(graph(f, local, lowered=True) for f in files if f in manifest["sha256"]))

    program.graph = graph("single.py", whole)
    program.stages = tuple(
        Stage(graph(f"stage{i}.py", local, piped=bool(program.axis)), *rest, lowered(f"stage{i}"))
        for i, rest in enumerate(stages)
    )
    if program.axis:
        program.schedule = schedule.parse((folder / SCHEDULE).read_text(encoding="utf-8"), str(folder / SCHEDULE))
    program.prologue = Stage(graph("counts.py", local), "counts") if "counts.py" in manifest["sha256"] else None
    program.spec = Spec.load(folder / SPEC) if SPEC in manifest["sha256"] else None
    if not as_compiled and os.environ.get("RANK", "0") == "0":
        what, _ = model_source.stale(program.meta)
        if what:
            fix = "compile it again, or say that it is meant so: shardc.load(folder, as_compiled=True)"
            print(f"note: {folder}: {what}; {fix}", file=sys.stderr, flush=True)
    return program


def _manifest(folder: Path, trust: bool) -> dict[str, Any]:
    """The manifest, after checking that the files are those it lists."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"{folder} is not a shardc artifact: it has no {MANIFEST}"
        raise ShardcError(what, where=str(folder), fix="make one with `shardc compile -o DIR`") from None
    except json.JSONDecodeError as e:
        raise ShardcError(
            f"{MANIFEST} is not JSON: {e.msg}", where=f"{path}:{e.lineno}:{e.colno}", fix="compile again"
        ) from None
    if not isinstance(manifest, dict) or not {"format", "torch", "sha256"} <= manifest.keys():
        raise ShardcError(
            f"{MANIFEST} is not the manifest of a shardc artifact",
            where=str(path),
            fix="make one with `shardc compile -o DIR`",
        )
    if manifest["format"] != FORMAT:
        raise ShardcError(
            f"artifact of format {manifest['format']}, this shardc reads {FORMAT}",
            where=str(folder),
            fix="compile again",
        )
    errors = Errors()
    then, here = (".".join(str(v).split(".")[:2]) for v in (manifest["torch"], torch.__version__))
    if then != here and not trust:
        what = f"compiled with torch {then}, but this is torch {here}, whose ops may differ"
        errors.add(what, where=str(folder), fix="compile again, or load it with trust=True (--trust)")
    for name, expected in manifest["sha256"].items():
        file = folder / name
        if not file.is_file():
            errors.add(f"{name} is missing", where=str(file), fix="compile again")
        elif _hash(file) != expected and not trust:
            errors.add(
                f"{name} was edited after it was written",
                where=str(file),
                fix="compile again, or load it with trust=True (--trust)",
            )
    errors.raise_any()
    return manifest


def _tables(folder: Path, manifest: dict[str, Any]) -> Program:
    """The program without its graphs and its spec."""
    mesh = Mesh.of(manifest["mesh"])
    tables = json.loads((folder / LAYOUTS).read_text(encoding="utf-8"))
    constants = load_file(folder / CONSTANTS) if CONSTANTS in manifest["sha256"] else {}

    def typed(x: dict[str, Any]) -> dict[str, Any]:
        shape, dtype, placements = parse(x["type"])
        return {"name": x["name"], "shape": shape, "dtype": dtype, "layout": Layout.of(placements, mesh)}

    def dtype(text: str) -> torch.dtype:
        actual: torch.dtype = getattr(torch, text.removeprefix("torch."))
        return actual

    params = tuple(
        Param(
            **typed(p),
            fqn=p["fqn"],
            aliases=tuple(p["aliases"]),
            members=tuple(p.get("members", ())),
            requires_grad=p["trained"],
            reduce=tuple(p["reduce"]),
            order=p["order"],
            bucket=p["bucket"],
            stages=tuple(p["stages"]),
        )
        for p in tables["params"]
    )
    buffers = tuple(
        Buffer(
            **typed(b),
            fqn=b["fqn"],
            aliases=tuple(b["aliases"]),
            updated=b["updated"],
            adds=b["adds"],
            persistent=b["persistent"],
            constant=_as(constants[b["name"]], typed(b)["dtype"]) if b["constant"] else None,
            stages=tuple(b["stages"]),
        )
        for b in tables["buffers"]
    )
    inputs = tuple(
        Input(**typed(i), path=tuple(i["path"]), microbatch=_shard(i["microbatch"])) for i in tables["inputs"]
    )
    outputs = tuple(
        Output(
            **typed(o),
            microbatch=_shard(o["microbatch"]),
            adds=o["adds"],
            divisor=o["divisor"],
            stage=o["stage"],
        )
        for o in tables.get("outputs", ())
    )
    buckets = tuple(
        Bucket(
            tuple(b["axes"]),
            dtype(b["dtype"]),
            tuple(b["params"]),
            b["shard"],
            b["zero"],
            dtype(b["compute"]) if b["compute"] else None,
            b["prefetch"],
            tuple(b["stages"]),
            b["late"],
            b["keep"],
        )
        for b in tables["buckets"]
    )
    notes, microbatches = tuple(manifest["notes"]), int(tables["microbatches"])
    regions = tuple(Region(**r) for r in tables.get("regions", ()))
    meta: dict[str, Any] = dict(manifest["meta"])
    # earlier artifacts have these three among the facts
    shared, loss_scale, offload = (
        manifest[key] if key in manifest else meta.pop(key, default)
        for key, default in (("shared_modules", ()), ("loss_scale", None), ("offload", {}))
    )
    return Program(
        mesh,
        fx.Graph(),
        params,
        buffers,
        inputs,
        (),
        buckets,
        microbatches,
        outputs=outputs,
        notes=notes,
        meta=meta,
        regions=regions,
        shared_modules=tuple(tuple(names) for names in shared),
        loss_scale=loss_scale,
        offload=OffloadPlaces(**offload),
        evaluates=manifest.get("evaluates", "alike"),
        eval_mode=manifest.get("eval_mode", False),
        still=tuple(manifest.get("still", ())),
        baked=tuple((tuple(path), value) for path, value in manifest.get("baked", ())),
    )


def _cut(s: Shard | None) -> dict[str, int] | None:
    return {"dim": s.dim, "split": s.split, "padding": s.padding, "blocks": s.blocks} if s is not None else None


def _shard(cut: dict[str, int] | None) -> Shard | None:
    return Shard(cut["dim"], cut["split"], (), cut["padding"], cut["blocks"]) if cut is not None else None


def _reals(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, as safetensors does not support complex128."""
    return torch.view_as_real(x) if x.is_complex() else x


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_reals`, where the program's dtype is complex."""
    return torch.view_as_complex(x) if dtype.is_complex and not x.is_complex() else x
