"""Bugs that trained wrong without an error, from public issue trackers, each in its situation here: a small model
(models.py), a spec, and what shardc does with them. tests/verify/test_field_bugs.py runs every one;
docs/generate.py makes the table of docs/measured/field-bugs.md.

Only bugs of training, and only those that a step on CPUs can have: races of CUDA streams are not here.

bugs.yaml  the bugs, by chapter
models     small models
functions  smaller ones, of a function each
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.verify.field_bugs import functions as functions  # fills the table of models


@dataclass(frozen=True)
class Bug:
    """thread: "owner/repository issues 1" (or pull); wrong: what went wrong there, as seen by who trained.

    model, spec: the situation here. here: "equal", or "refused: " and a regular expression of the message. mutant: of
    tests/verify/mutants.py, the kind of broken program that makes the same mistake. check: "steps": two steps of the
    whole model in eager mode are the reference; "verify": of one device by shardc.verify, for what draws random
    numbers; else the name of a check of the runtime in the test. clip: the gradient is clipped to this norm.
    optimizer: of the test's OPTIMIZERS.
    """

    thread: str
    wrong: str
    model: str
    spec: dict[str, Any] = field(default_factory=dict)
    here: str = "equal"
    mutant: str = ""
    check: str = "steps"
    clip: float | None = None
    optimizer: str = "momentum"

    @property
    def name(self) -> str:
        """ "Megatron-LM#1446"."""
        repository, _, number = self.thread.split()
        return f"{repository.partition('/')[2]}#{number}"

    @property
    def link(self) -> str:
        repository, kind, number = self.thread.split()
        return f"https://github.com/{repository}/{kind}/{number}"


CHAPTERS: dict[str, list[Bug]] = {
    title: [Bug(**{**row, "spec": {"shardc": 1, **row["spec"]}}) for row in rows]
    for title, rows in yaml.safe_load(Path(__file__).with_name("bugs.yaml").read_text(encoding="utf-8")).items()
}
BUGS = [bug for chapter in CHAPTERS.values() for bug in chapter]
