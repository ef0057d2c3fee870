"""Define `shardc inspect`: show a program as text, tables, one page or JSON."""

from __future__ import annotations

import functools
import json
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardc.cli import common
from shardc.cli.options import FullOption, Named, names_program, option
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.cost import Cost


@names_program()
def command(
    named: Named,
    stage: Annotated[int | None, option("only this stage")] = None,
    before: Annotated[bool, option("the captured graph: the model as one device runs it; needs no spec")] = False,
    diff: Annotated[
        str | None, option("what a pass changed, by its name; `--diff list` lists the passes that ran")
    ] = None,
    comm: Annotated[bool, option("collectives of a step by axis and cause; which compute hides them")] = False,
    coverage: Annotated[bool, option("ops of a model file that no rule knows, and their lines; needs no spec")] = False,
    joint: Annotated[bool, option("the forward and backward graphs of a step")] = False,
    html: Annotated[
        Path | None, option("write an interactive page: graphs, timeline, memory, proof; one HTML file")
    ] = None,
    memory: Annotated[bool, option("memory of a step on each rank, by kind; the op at the peak")] = False,
    device: Annotated[
        str | None,
        option(
            "of --memory, --comm, --schedule and what is written: a name of `shardc device`, or a YAML file "
            "(default: the spec's device, else h100-80g)"
        ),
    ] = None,
    schedule: Annotated[bool, option("timeline of a pipeline: bubbles, live activations")] = False,
    scores: Annotated[bool, option("attention: which part of the queries x keys square each rank computes")] = False,
    trace: Annotated[
        Path | None, option("write a step as a trace, which ui.perfetto.dev opens: work and messages of each rank")
    ] = None,
    memory_snapshot: Annotated[
        Path | None, option("write a step's memory as a snapshot, which pytorch.org/memory_viz opens")
    ] = None,
    full: FullOption = False,
) -> None:
    """Show a program: its typed text, the captured graph, what a pass changed, its collectives."""
    from shardc.cost.measured.device_file import device as known_device

    as_json = named.as_json
    with common.reporting(named.debug, as_json) as show, tempfile.TemporaryDirectory() as folder:
        common.check_outputs({"--html": html, "--trace": trace, "--memory-snapshot": memory_snapshot})
        if device is not None:
            known_device(device)
        if coverage:
            _coverage(named, show)
            return
        from shardc.artifact import emit
        from shardc.artifact.repeated_layers import Fold
        from shardc.report import attention_scores, kept_activations, text
        from shardc.report import comm as of_comm
        from shardc.report import cost as of_cost
        from shardc.report.memory_snapshot import snapshot
        from shardc.report.page import html as of_page
        from shardc.report.trace import trace as of_step

        one_device = before and named.spec is None and not common.is_artifact(named.model)
        spec, dump = common.ONE_DEVICE if one_device else None, Path(folder) if diff else None
        program = common.program_of(named, spec, dump=dump, as_compiled=True)
        if stage is not None and not 0 <= stage < len(program.stages):
            last = len(program.stages) - 1
            raise ShardcError(f"there is no stage {stage}", where="--stage", fix=f"name one of stages 0 to {last}")

        @functools.cache
        def cost() -> Cost:
            with common.progress("running a step without data", quiet=as_json) as on:
                of_rank = "running a step of {} without data".format
                return program.cost(device, on=lambda rank, done, total: on(of_rank(rank), done, total))

        if html:  # a program that is not compiled has no step to price and nothing to prove
            priced = cost() if program.stages else None
            with common.console.status("proving"):
                proof = program.prove() if program.stages else None
            html.write_text(of_page(program, priced, proof, full=full), encoding="utf-8")
        if trace:
            trace.write_text(json.dumps(of_step(cost())), encoding="utf-8")
        if memory_snapshot:
            memory_snapshot.write_bytes(pickle.dumps(snapshot(cost())))
        written = [str(file) for file in (html, trace, memory_snapshot) if file]
        if scores:
            show(attention_scores.text(program), attention_scores.to_json(program))
        elif schedule:
            _schedule(cost(), show)
        elif memory:
            show(f"{of_cost.table(cost())}\n\n{kept_activations.table(cost())}", of_cost.to_json(cost()))
        elif joint:
            graphs = program.joint(stage)
            if not graphs:
                fix = "leave --forward out"
                raise ShardcError("this program is forward-only: it has no backward graph", where="--joint", fix=fix)
            show(graphs, {"text": graphs})
        elif comm:
            show(of_comm.comm_table(cost()), [r.to_json() for r in of_comm.comm_rows(cost())])
        elif as_json:
            show(document=text.to_json(program))
        elif diff:
            show(_difference(Path(folder), diff, named.model))
        elif before:
            show(text.before(program, full=full))
        elif stage is not None:
            chosen = program.stages[stage]
            show(emit.function(chosen.graph, program, chosen.name, Fold(program, full=full)))
        elif written:
            show(f"written to {' and '.join(written)}")
        else:
            show(program.text(full=full))


def _coverage(named: Named, show: common.Show) -> None:
    """Show the ops of a model file that have no rule."""
    if common.is_artifact(named.model):
        fix = "name a model file: shardc inspect model.py --coverage"
        raise ShardcError("every op of a compiled DIR has a rule", where=named.model, fix=fix)
    from shardc.cli import model_file
    from shardc.report.coverage import coverage

    file = model_file.load(named.model, batch=named.batch, seq=named.seq, data=named.data)
    with common.console.status("capturing"):
        covered = coverage(file.on_meta(), file.batch, loss=file.loss)
    show(str(covered), covered.to_json())


def _schedule(cost: Cost, show: common.Show) -> None:
    from rich.console import Console

    from shardc.report import timeline

    terminal, text = Console(), timeline.text(cost.timeline).plain
    if terminal.is_terminal:
        with terminal.capture() as printed:
            terminal.print(timeline.text(cost.timeline, width=terminal.width))
        text = printed.get().rstrip("\n")
    step = {"device": cost.device.name, "step_seconds": cost.step_seconds}
    show(f"{text}\non {cost.device.name}: {cost.step_words}", timeline.to_json(cost.timeline) | step)


def _difference(folder: Path, name: str, model: str) -> str:
    """Return the difference that one pass made, from the dumps in `folder`."""
    diffs = {p.stem.partition("-")[2]: p for p in sorted(folder.glob("*.diff"))}
    if not diffs:
        fix = "shardc inspect model.py spec.yaml --diff PASS"
        raise ShardcError("--diff needs a model and a spec: a compiled DIR does not keep passes", where=model, fix=fix)
    if name not in diffs:
        raise ShardcError(f"there is no pass {name}", where="--diff", fix=f"name one of {', '.join(diffs)}")
    return diffs[name].read_text() or f"{name} changed nothing"
