"""Define `shardc export`: export a checkpoint for transformers or peft, or as safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardc.cli.common import check_outputs, reporting
from shardc.cli.options import DebugOption, PushOption, option
from shardc.errors import Errors, ShardcError
from shardc.optional import needed, registered

if TYPE_CHECKING:
    from shardc.cli.model_file import ModelFile
    from shardc.ir.program import Program


def command(
    model: Annotated[str, typer.Argument(help="model.py, model.py:builder, or hf:DIR", show_default=False)],
    checkpoint: Annotated[Path, typer.Argument(help="folder that --save wrote", show_default=False)],
    out: Annotated[Path, typer.Argument(help="folder to write, or FILE.safetensors", show_default=False)],
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, option("of floating-point weights; default: as saved")
    ] = None,
    best: Annotated[bool, option("the best checkpoint of a run with `keep: best`, not the last one")] = False,
    spec: Annotated[Path | None, option("spec.yaml, if it puts adapters beside the model's weights")] = None,
    merge: Annotated[bool, option("write the whole model, with adapters merged into their weights")] = False,
    max_file_gb: Annotated[float | None, option("maximum size of a file in GB; default: 5", min=0.001)] = None,
    overwrite: Annotated[bool, option("replace weights in OUT that shardc did not write")] = False,
    push_to_hub: PushOption = None,
    debug: DebugOption = False,
) -> None:
    """Export the weights of a checkpoint for other tools, slice by slice, in one process."""
    with reporting(debug) as show:
        import torch

        from shardc.cli import model_file
        from shardc.ir.mesh import Mesh
        from shardc.runtime.mesh.loopback import loopback
        from shardc.runtime.state.boxes import cuts
        from shardc.runtime.state.checkpoint_folder import best_of, checkpoints_in, none_in
        from shardc.runtime.state.export import MAX_FILE_BYTES, foreign_weights, plan, refused, skeleton, write
        from shardc.runtime.state.fitting import check_tensors
        from shardc.runtime.state.init import record
        from shardc.runtime.state.pretrained import named_state
        from shardc.runtime.state.weight_files import open_weights
        from shardc.runtime.storage.disk_calls import expanded

        checkpoint = expanded(checkpoint)
        check_outputs(folders={"OUT": out.parent if out.suffix == ".safetensors" else out})
        if not overwrite and (foreign := foreign_weights(out)) is not None:
            raise refused(foreign, "add --overwrite")
        if not checkpoints_in(checkpoint):
            raise none_in(checkpoint)
        if push_to_hub:
            needed("hub", "upload", "prepare")(push_to_hub, out)
        if best:
            chosen_one = best_of(checkpoints_in(checkpoint)[0].path.parent)
            if chosen_one is None:
                fix = "train with `--keep best`, or name the folder that the run saved to before a resume"
                raise ShardcError("the best checkpoint of the run is not in this folder", where="--best", fix=fix)
            checkpoint = chosen_one.path
        file = model_file.load(model)
        built, recipe = record(file.build)
        stored = open_weights(checkpoint).tensors
        program = _program(file, spec, stored, merge=merge)
        state = named_state(built)
        first = {id(x): n for n, x in reversed(state.items())}
        ties = {n: first[id(x)] for n, x in state.items() if first[id(x)] != n}
        wanted, present = ({n: tuple(x.shape) for n, x in y.items() if n not in ties} for y in (state, stored))
        fix = "name the model file of the training"
        check_tensors(errors := Errors(), wanted, present, present, str(checkpoint), fix)
        errors.raise_any()
        names = [n for n in state if n not in ties]
        if program is not None:
            names += [n for p in program.params if p.added for n in p.names]
        tensors = {n: (tuple(stored[n].shape), stored[n].dtype) for n in names}
        carried = file.weights if file.weights is not None and file.weights.is_dir() else recipe.folder
        chosen = getattr(torch, dtype) if dtype is not None else None
        layouts = plan(out, tensors, ties, skeleton(built), carried, chosen, program, merge=merge)

        def held(name: str) -> Iterator[tuple[Any, Any, torch.Tensor]]:
            """Yield a tensor in boxes of whole rows, of at most 64 MiB each."""
            shape, of_dtype = tensors[name]
            for box in cuts(shape, of_dtype.itemsize, 64 << 20):
                yield *box, stored[name].read(*box)

        (mesh,) = loopback(Mesh.of({"dp": 1}), lambda mesh: mesh)
        limit = int(max_file_gb * 1e9) if max_file_gb else MAX_FILE_BYTES
        for layout in layouts:
            write(layout, held, lambda name: stored[name].tensor(), mesh, limit)
        for write_card in registered("card", "of_export"):
            write_card(out, carried, checkpoint)
        show(f"written to {out}: {', '.join(sorted({f'{x.stem}.safetensors' for x in layouts}))}")
        if push_to_hub:
            show(f"uploaded to {needed('hub', 'upload', 'upload')(out, push_to_hub)}")


def _program(file: ModelFile, spec: Path | None, stored: Mapping[str, Any], *, merge: bool) -> Program | None:
    """Return the program of a spec that adds tensors to the model. Raises ShardcError if the checkpoint has others."""
    from shardc.compile import compile

    model = file.on_meta()
    if spec is None:
        more = [n for n in stored if n not in model.state_dict()]
        if more or merge:
            fault = f"the checkpoint has {more[0]}, which the model lacks" if more else "there is no spec with adapters"
            raise ShardcError(fault, where="--spec", fix="name the spec of the training: --spec spec.yaml")
        return None
    program = compile(model, file.batch, spec, loss=file.loss, prove=False, overrides=("data.zero=0",))
    added = [n for p in program.params if p.added for n in p.names]
    lost = [n for n in added if n not in stored]
    if lost or not added:
        fault = f"the checkpoint has no {lost[0]}" if lost else "the spec has no `adapters`"
        raise ShardcError(fault, where="--spec", fix="name the spec that the checkpoint was trained with")
    return program
