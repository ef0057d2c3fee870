"""A compiled program on disk: readable Python, layouts, a manifest. No pickle.

    manifest.json    format, versions, mesh, hashes of the other files, notes, facts
    spec.yaml        the spec it was compiled from
    layouts.json     parameters, buffers, inputs, buckets, in the notation of shardc.placement
    single.py        the model as one device runs it
    stage0.py        what every rank runs; `forward` in it is just what is executed after loading
    constants.safetensors   tensors that capture found in the code
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardc import emit
from shardc.errors import ShardcError
from shardc.mesh import Mesh
from shardc.parse import graph_of
from shardc.placement import Layout, parse, show
from shardc.program import Bucket, Buffer, Input, Param, Program, Stage, Value
from shardc.spec import Spec

FORMAT = 1
MANIFEST = "manifest.json"


def save(program: Program, folder: str | Path) -> None:
    """Write a program to a folder, whole or not at all. An artifact that is there is replaced; any other folder is left alone."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]) and not (folder / MANIFEST).exists():
        raise ShardcError(f"{folder} exists and is no shardc artifact", where=str(folder), fix="name a new or empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(program, made)
        made.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _write(program: Program, folder: Path) -> None:
    files = {"single.py": emit.module(program.graph, program, "The model as one device runs it.")}
    for i, stage in enumerate(program.stages):
        files[f"stage{i}.py"] = emit.module(stage.graph, program, f"{stage.name}: what every rank of {program.mesh} runs.")
    files["layouts.json"] = json.dumps(_layouts(program), indent=1, ensure_ascii=False)
    if program.spec is not None:
        files["spec.yaml"] = str(program.spec)
    for name, content in files.items():
        (folder / name).write_text(content)
    constants = {b.name: b.constant.contiguous() for b in program.buffers if b.constant is not None}
    if constants:
        save_file(constants, folder / "constants.safetensors")
    manifest = {
        "format": FORMAT, "shardc": "0.1.0", "torch": str(torch.__version__), "mesh": dict(program.mesh.axes),
        "stages": [s.name for s in program.stages], "notes": list(program.notes), "meta": program.meta,
        "sha256": {f.name: _hash(f) for f in sorted(folder.iterdir())},
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False))


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _layouts(program: Program) -> dict[str, Any]:
    def named(x: Param | Buffer | Input) -> dict[str, Any]:
        return {"name": x.name, "type": show(x.shape, x.dtype, x.layout)}

    return {
        "params": [
            {**named(p), "fqn": p.fqn, "aliases": p.aliases, "trained": p.requires_grad, "reduce": p.reduce, "order": p.order, "bucket": p.bucket}
            for p in program.params
        ],
        "buffers": [
            {**named(b), "fqn": b.fqn, "aliases": b.aliases, "updated": b.updated, "persistent": b.persistent, "constant": b.constant is not None}
            for b in program.buffers
        ],
        "inputs": [{**named(i), "path": i.path} for i in program.inputs],
        "buckets": [{"axes": b.axes, "dtype": str(b.dtype), "params": b.params} for b in program.buckets],
    }  # fmt: skip


def load(folder: str | Path, *, trust: bool = False) -> Program:
    """Read a program that `save` wrote. trust: accept files that were edited since.

    Raises ShardcError for what is no artifact, is damaged, edited, or of another format.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        what = f"{folder} is no shardc artifact: it has no {MANIFEST}"
        raise ShardcError(what, where=str(folder), fix="make one with `shardc compile -o DIR`") from None
    except json.JSONDecodeError as e:
        raise ShardcError(f"{MANIFEST} is no JSON: {e.msg}", where=f"{folder / MANIFEST}:{e.lineno}:{e.colno}", fix="compile again") from None
    if manifest.get("format") != FORMAT:
        raise ShardcError(f"artifact of format {manifest.get('format')}, this shardc reads {FORMAT}", where=str(folder), fix="compile again")
    for name, expected in manifest["sha256"].items():
        file = folder / name
        if not file.exists():
            raise ShardcError(f"{name} is missing", where=str(file), fix="compile again")
        if _hash(file) != expected and not trust:
            raise ShardcError(f"{name} was edited after it was written", where=str(file), fix="compile again, or load it with trust=True (--trust)")
    mesh = Mesh.of(manifest["mesh"])
    tables = json.loads((folder / "layouts.json").read_text())
    constants = load_file(folder / "constants.safetensors") if (folder / "constants.safetensors").exists() else {}

    def typed(x: dict[str, Any]) -> dict[str, Any]:
        shape, dtype, placements = parse(x["type"])
        return {"name": x["name"], "shape": shape, "dtype": dtype, "layout": Layout.of(placements, mesh)}

    params = tuple(
        Param(
            **typed(p), fqn=p["fqn"], aliases=tuple(p["aliases"]), requires_grad=p["trained"], reduce=tuple(p["reduce"]), order=p["order"],
            bucket=p["bucket"],
        )
        for p in tables["params"]
    )  # fmt: skip
    buffers = tuple(
        Buffer(
            **typed(b), fqn=b["fqn"], aliases=tuple(b["aliases"]), updated=b["updated"], persistent=b["persistent"],
            constant=constants[b["name"]] if b["constant"] else None,
        )
        for b in tables["buffers"]
    )  # fmt: skip
    inputs = tuple(Input(**typed(i), path=tuple(i["path"])) for i in tables["inputs"])
    buckets = tuple(Bucket(tuple(b["axes"]), getattr(torch, b["dtype"].removeprefix("torch.")), tuple(b["params"])) for b in tables["buckets"])
    local = {x.name: x.value for xs in (params, buffers, inputs) for x in xs}
    whole = {n: Value(v.shape, v.dtype, v.requires_grad) for n, v in local.items()}

    def graph(name: str, types: dict[str, Value]) -> Any:
        return graph_of((folder / name).read_text(), mesh, types, str(folder / name))

    stages = tuple(Stage(graph(f"stage{i}.py", local), name) for i, name in enumerate(manifest["stages"]))
    spec = Spec.load(folder / "spec.yaml") if (folder / "spec.yaml").exists() else None
    return Program(
        mesh, graph("single.py", whole), params, buffers, inputs, stages, buckets, spec, tuple(manifest["notes"]), manifest["meta"]
    )  # fmt: skip
