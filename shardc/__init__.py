"""Compile PyTorch models into sharded programs: a declarative compiler. Start at `shardc.compile`.

Public names are loaded on first use (PEP 562), so that `import shardc` and `shardc --help` need no torch.

compile       a model and a spec -> a program; recompile: for a batch of other sizes; api: methods of a program
ir            data structures of a program             spec       what users write
capture       the model as a graph                     passes     the stages of compilation
rules         how each op may be split                 verify     programs and rules against one device
runtime       what runs on a rank                      artifact   a program on disk
machine       seconds and bytes of ops, on a device    report     text, tables and pictures
cost, plan    time and memory; the fastest spec        nn         functions that torch has no op for
cli           the commands                             errors     ShardcError; layer_names: errors of layers, merged
features      what can be left out, a folder each        optional   what features register, for tables of core
text: what users call of the feature of that name
call_arguments: checks arguments of public functions
collector: when Python collects garbage
torch_modes, torch_private    modes and private modules of torch; text_file: reads small text files; version

passes, runtime and specs are links to the folders at the top of the repository.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from shardc.version import VERSION

if TYPE_CHECKING:  # the same table as _MODULES, for type checkers and editors
    from shardc import text as text
    from shardc.api import Program as Program
    from shardc.api import load as load
    from shardc.compile import compile as compile
    from shardc.errors import ShardcError as ShardcError
    from shardc.plan import Plan as Plan
    from shardc.plan import plan as plan
    from shardc.report.coverage import Coverage as Coverage
    from shardc.report.coverage import coverage as coverage
    from shardc.rules.core.user_ops import rule as rule
    from shardc.runtime.step.param_groups import groups as groups
    from shardc.runtime.step.param_groups import matrices as matrices
    from shardc.runtime.zero.optimizer_check import whole as whole
    from shardc.spec import Spec as Spec
    from shardc.verify.rules.check import check_rule as check_rule
    from shardc.verify.simulate import Simulation as Simulation
    from shardc.verify.simulate import simulate as simulate

__version__ = VERSION

#: Public name -> the module that defines it.
_MODULES = {
    "Coverage": "shardc.report.coverage",
    "Plan": "shardc.plan",
    "Program": "shardc.api",
    "ShardcError": "shardc.errors",
    "Simulation": "shardc.verify.simulate",
    "Spec": "shardc.spec",
    "check_rule": "shardc.verify.rules.check",
    "compile": "shardc.compile",
    "coverage": "shardc.report.coverage",
    "groups": "shardc.runtime.step.param_groups",
    "load": "shardc.api",
    "matrices": "shardc.runtime.step.param_groups",
    "plan": "shardc.plan",
    "rule": "shardc.rules.core.user_ops",
    "simulate": "shardc.verify.simulate",
    "whole": "shardc.runtime.zero.optimizer_check",
}
__all__ = list(_MODULES)


#: Names that users try first -> what to use instead.
_TRAINS = "shardc.compile(model, batch, spec) gives a program, and program.engine(model).step(batch) trains"
_INSTEAD = dict.fromkeys(
    ("train", "fit", "run", "shard", "parallelize", "distribute", "engine", "Engine", "module"), _TRAINS
)


def __getattr__(name: str) -> object:
    if name in ("engines", "text"):
        return import_module(f"shardc.{name}")
    if name not in _MODULES:
        hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module 'shardc' has no attribute {name!r}{hint}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


class _Package(ModuleType):
    """The package: importing the module `shardc.compile` or `shardc.plan` does not hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
