"""Make the trackers of a run: callbacks of the first rank (shardc.runtime.checks.callbacks).

A tracker records the configuration and spec, the numbers of each line of steps.jsonl, and in the end the summary with
the state. A run that goes on from its own checkpoint goes on in the tracker's run, whose id the checkpoint keeps.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shardc.errors import Errors
from shardc.optional import install
from shardc.runtime.mesh.watch import print_line

#: The trackers, each a file here, and the module that each needs. `run: {track: ...}` of the spec has the same names.
CLIENTS = {
    "tensorboard": "tensorboard.compat",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "opentelemetry": "opentelemetry.sdk.metrics",
}


def check_installed(names: Iterable[str]) -> None:
    """Raise ShardcError for trackers whose client is not installed."""
    errors = Errors()
    for name in names:
        try:
            spec = find_spec(CLIENTS[name])
        except ModuleNotFoundError:  # a package around it
            spec = None
        if spec is None or spec.origin is None:  # the folder wandb/ that it leaves beside a script is no package
            errors.add(f"{name} is not installed", where=f"--track {name}", fix=install(name))
    errors.raise_any()


def make(names: Iterable[str]) -> list[Tracker]:
    """Make the trackers of these names."""
    return [import_module(f"shardc.features.trackers.{name}").Tracker(name) for name in names]


class Tracker(ABC):
    """A callback of the first rank. If its client fails, it warns once; later numbers are tried again."""

    rank0 = True

    def __init__(self, name: str) -> None:
        self.name, self._is_open, self._warned = name, False, False

    @abstractmethod
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        """Begin a run, or go on with that of this id; return its id. run: facts of the run."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record the numbers of a step."""

    @abstractmethod
    def close(self, summary: Mapping[str, Any]) -> None:
        """End the run. summary: with `state`: finished, stopped early, interrupted or failed."""

    def run_begins(self, engine: Any, run: Mapping[str, Any]) -> None:
        ids, self._is_open = engine.extra.setdefault("trackers", {}), True
        id = self._safely(self.open, run, ids.get(self.name) if run["goes_on"] else None)
        ids[self.name], self._is_open = id, id is not None

    def logged(self, engine: Any, line: Mapping[str, Any]) -> None:
        numbers = {n: x for n, x in flat(line, "/") if isinstance(x, (int, float)) and n != "step"}
        self._safely(self.log, {n: x for n, x in numbers.items() if not n.startswith("held_out")}, line["step"])

    def evaluated(self, engine: Any, values: Mapping[str, float]) -> None:
        named = {"held_out" if n == "loss" else f"held_out_outputs/{n}": x for n, x in values.items()}
        self._safely(self.log, named, engine.step_count)

    def run_ends(self, engine: Any, summary: Mapping[str, Any]) -> None:
        self._safely(self.close, summary)

    def _safely(self, work: Any, *arguments: Any) -> Any:
        try:
            return work(*arguments) if self._is_open else None
        except (Exception, SystemExit) as e:  # any error of the client, such as of the network
            self.warn(f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}")

    def warn(self, fault: str) -> None:
        """Print that the client fails, once."""
        if not self._warned:
            print_line(f"note: {self.name} fails, and the run goes on: {fault}")
        self._warned = True


def flat(facts: Mapping[str, Any], between: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of nested facts, with names such as settings.clip, or waited/dp."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat(value, between, f"{prefix}{name}{between}")
        else:
            yield prefix + name, value


def texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return nested facts as texts, without the spec."""
    return {name: str(value) for name, value in flat(facts) if name != "spec"}


def plain_name(name: str) -> str:
    """Return a name with the characters that all trackers take: bytes/dp+tp becomes bytes/dp.tp."""
    return re.sub(r"[^\w./-]", ".", name)
