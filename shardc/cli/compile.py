"""Define `shardc compile`: compile a model and a spec to an artifact, or to text on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardc.cli import common
from shardc.cli.options import FullOption, Named, names_program, option
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.api import Program


#: Seconds. A longer proof is left to `shardc verify --static`.
PROOF_SECONDS = 10.0


@names_program("trust", "model_file")
def command(
    named: Named,
    output: Annotated[Path | None, option("folder for the artifact", "-o", "--output")] = None,
    dump: Annotated[Path | None, option("folder for the text after every pass (one pass: inspect --diff)")] = None,
    full: FullOption = False,
) -> None:
    """Compile a model and a spec; write the artifact with -o, else print the program."""
    with common.reporting(named.debug, named.as_json) as show:
        from shardc.report.text import to_json

        if common.is_artifact(model := named.model):
            fix = "name a model file; `shardc inspect DIR` shows a compiled one"
            raise ShardcError(f"{model} is a folder", where=model, fix=fix)
        common.check_outputs(folders={"--output": output, "--dump": dump})
        if output:
            from shardc.artifact import check_free

            check_free(output, str(output))
        program = common.program_of(named, dump=dump)
        if output:
            program.save(output)
        show(
            lambda: f"{_summary(program, output)}\nwritten to {output}" if output else program.text(full=full),
            lambda: {**to_json(program), "output": str(output) if output else None},
        )


def _summary(program: Program, output: Path) -> str:
    """Summarize a program: sizes, the stages, the verdict of its proof, the entries that `use:` made, notes."""
    from shardc.ir.units import size
    from shardc.layer_names import note_lines
    from shardc.verify.static import prove_within

    total = size(sum(p.value.nbytes() for p in program.params))
    local, most = size(program.parameter_bytes()), "on the rank with most" if program.axis else "a rank"
    lines = [
        f"{program.meta.get('model')} on {program.mesh}: {program.mesh.world} ranks, compiled in"
        f" {program.meta.get('compile_seconds')} s",
        f"parameters {total}, {local} {most}",
    ]
    if program.axis:
        of_stages = [[p.fqn for p in program.params if i in p.stages] or ["-"] for i in range(len(program.stages))]
        lines.append(f"stages: {' | '.join(f'{names[0]} .. {names[-1]}' for names in of_stages)}")
    proof = prove_within(program, PROOF_SECONDS)
    unproven = f"not proven yet: run `shardc verify {output} --static`, which takes longer"
    lines.append(unproven if proof is None else str(proof).partition("\n")[0] if proof.ok else str(proof))
    if entries := program.meta.get("shard"):
        lines += ["shard:  # what `use` came to", *entries]
    return "\n".join([*lines, *note_lines(program.notes)])
