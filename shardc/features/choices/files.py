"""Write and read choices of a run, by sample: neither the order of samples nor the mesh matters.

    DIR/step-00000012.safetensors      sample: i64[8], numbers of the samples of step 12
                                       layers.0.gate: i32[8, 16, 2], their choices, in that order

A run that resumes writes a step's file again, with the same numbers. Of a sample that several files have, the last
step's counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.choices.section import of
from shardc.ir.program import Program
from shardc.runtime.state.tensor_file import open_safetensors

_SAMPLE = "sample"


def open_files(path: Path, engine: Any, *, held_out: bool) -> Files:
    """Return the files of a run. Raises ShardcError for a spec that does not fit, and for files without choices."""
    program: Program = engine.program
    modes = {entry.mode for entry in of(program.spec).values()}
    if len(modes) != 1:
        fault = "the spec both records and replays choices" if modes else "the spec has no `choices`"
        fix = 'write `choices: {"*.gate": replay}`, or record: one of them for all modules'
        raise ShardcError(fault, where="--choices", fix=fix)
    if "replay" in modes and held_out:
        fix = "let data('valid') return None; score held-out rows afterwards, with a spec without `choices`"
        raise ShardcError(
            "there are choices of training samples only, and the run evaluates", where="--choices", fix=fix
        )
    return Files(path, engine, replays="replay" in modes)


class Files:
    """The choices of a run's samples in a folder, or in one file."""

    def __init__(self, path: Path, engine: Any, *, replays: bool) -> None:
        self.path, self.engine, self.replays = path, engine, replays
        self.names = [str(x.path[1]) for x in engine.program.inputs if x.choice is not None]
        #: Sample -> the file with its choices, and the row there.
        self.places: dict[int, tuple[Path, int]] = {}
        if not replays:
            return
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            with open_safetensors(file) as f:
                lacking = [n for n in (_SAMPLE, *self.names) if n not in f.keys()]  # noqa: SIM118
                if lacking:
                    fix = "name what a run with `record` wrote, of the same model"
                    raise ShardcError(f"the file has no {lacking[0]!r}", where=str(file), fix=fix)
                self.places |= {s: (file, row) for row, s in enumerate(f.get_tensor(_SAMPLE).tolist())}
        if not self.places:
            raise ShardcError("there are no choices", where=str(path), fix="name the folder that a run recorded")

    def options(self, samples: Tensor, *, local: bool) -> Mapping[str, Any]:
        """Return the options of `engine.step` for a batch of these samples: their choices, of this rank if local."""
        if not self.replays:
            return {"gather": True}
        if lacking := [s for s in samples.tolist() if s not in self.places]:
            fix = "record a run over the same data, or replay fewer steps"
            raise ShardcError(f"there are no choices of sample {lacking[0]}", where=str(self.path), fix=fix)
        rows: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for sample in samples.tolist():
            file, row = self.places[sample]
            with open_safetensors(file) as f:
                for name in self.names:
                    rows[name].append(f.get_slice(name)[row : row + 1])
        whole = {name: torch.cat(parts) for name, parts in rows.items()}
        if not local:
            return {"choices": whole}
        program, rank = self.engine.program, self.engine.mesh.rank
        layouts = {str(x.path[1]): x.layout for x in program.inputs if x.choice is not None}
        coords = program.mesh.coords(rank)
        return {"choices": {n: layouts[n].local(x, program.mesh, coords).contiguous() for n, x in whole.items()}}

    def take(self, samples: Tensor, values: dict[str, Tensor]) -> None:
        """Take the choices of a step out of the values beside its loss, and write them, on the first rank."""
        names = self.engine.program.features.get("choices", ())
        tensors = {name: values.pop(name).cpu().contiguous() for name in names}
        if self.replays or self.engine.mesh.rank:
            return
        from safetensors.torch import save_file

        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / f"step-{self.engine.step_count:08}.safetensors"
        new = file.with_suffix(".new")
        save_file({**tensors, _SAMPLE: samples}, new)
        new.replace(file)
