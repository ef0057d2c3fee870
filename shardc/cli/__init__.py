"""Define the command line `shardc`: each command is a file with a function `command`.

common          what all commands share: reports of errors, and a program from the user's arguments
model_file      reads the model.py that commands name; config_file: the config.json of a transformers model
ranks/          runs the ranks of run, score and generate: starts the processes, and does their work

Exit status: 0 done, 1 the check or the run failed, 2 the input is wrong.

init                        writes a model file and a spec for a folder of transformers
compile, inspect, verify    write an artifact from a model and a spec; show it; compare it with one device
run, plan                   train; find the fastest spec for a number of devices
cost                        shows where the time of a step goes, and where a run differs from the prediction
score, generate             compute log-probabilities of data; generate tokens after prompts
checkpoint, export          list, verify and convert checkpoints; export weights for transformers
device, rules, spec         show devices that programs are priced for, rules of ops, the format of specs
options                     options of several commands; options of `run`, one for each key of the spec's section
hidden_modules              refuses files with the name of a module that shardc imports
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from importlib import import_module
from typing import Annotated

import typer

# A rank reports a lost store in shardc's words; torch's C++ would add 30 lines of frames. torch reads this when it
# is imported, which nothing here does.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from shardc.cli.options import Command, option

#: The commands, a file each, in the order of the help.
COMMANDS = "init compile inspect verify run score generate export plan cost rules device spec"

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
for command in COMMANDS.split():
    module = import_module(f"shardc.cli.{command}")
    app.command(command, cls=Command, epilog=getattr(module, "EXAMPLES", None))(module.command)
app.add_typer(import_module("shardc.cli.checkpoint").app, name="checkpoint")


def _version(wanted: bool) -> None:
    if wanted:
        from shardc import __version__

        print(f"shardc {__version__}")
        raise typer.Exit


@app.callback()
def shardc_command(
    version: Annotated[
        bool, option("print the version and exit", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command. If no other thread runs then, leave at once: Python's own end takes all of torch apart."""
    try:
        app()
    except SystemExit as end:
        if threading.active_count() > 1 or not isinstance(end.code, int):
            raise
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # the reader has left: Python reports it as for any program
            raise end from None
        os._exit(end.code)
