"""The command line, `shardc`: a file a command, each with a function `command`; `common` has what they share.

model_file      reads the model.py that commands name; config_file: the config.json of a transformers model
ranks/          what run, score and generate do with ranks: start them, and what each process does

Exit status: 0 done, 1 the check or the run failed, 2 the input is wrong.

compile, inspect, verify    a model and a spec -> an artifact; shown; compared with one device
run, plan                   train; which spec is fastest on so many devices
cost                        what a step's time goes to; where a run and the prediction differ
score, generate             log-probabilities of data; tokens after prompts
checkpoint, export          folders of checkpoints; weights for transformers
device, rules, spec         devices that programs are priced for; rules of ops, proven; the format of specs
options                     those that several commands have; those of `run`, one for each key of the spec's section
hidden_modules              files that are named as a module that shardc imports
same_error_once             an error that all ranks have alike is printed once
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

# A rank whose store goes away says so in words of its own; torch's C++ would add 30 lines of frames. Read by torch when
# it is imported, which nothing here does.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from shardc.cli import (
    checkpoint,
    compile,
    cost,
    device,
    export,
    generate,
    inspect,
    plan,
    rules,
    run,
    score,
    spec,
    verify,
)

app = typer.Typer(
    name="shardc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "A declarative model-sharding compiler for PyTorch: an unmodified model and a YAML spec become the program of"
        " every rank."
    ),
)
for name, module in {
    "compile": compile,
    "inspect": inspect,
    "verify": verify,
    "run": run,
    "score": score,
    "generate": generate,
    "export": export,
    "plan": plan,
    "cost": cost,
    "rules": rules,
    "device": device,
    "spec": spec,
}.items():
    app.command(name)(module.command)
app.add_typer(checkpoint.app, name="checkpoint")


def _version(wanted: bool) -> None:
    if wanted:
        from shardc import __version__

        print(f"shardc {__version__}")
        raise typer.Exit


@app.callback()
def shardc_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
