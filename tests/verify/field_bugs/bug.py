"""A bug, and the sections of specs that several share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]


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
    spec: Spec = field(default_factory=dict)
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


def on(mesh: str, **more: Any) -> Spec:
    """ "dp=2 tp=2" and sections."""
    sizes = {axis: int(n) for axis, n in (x.split("=") for x in mesh.split())}
    split = {"shard": {"use": "structure"}} if "tp" in sizes else {}
    return {"shardc": 1, "mesh": sizes, **split, **more}


def zero(stage: int, **more: Any) -> Spec:
    return {"data": {"zero": stage, "bucket_mb": 0.002, **more}}


MICRO: Spec = {"batch": {"microbatches": 2}}
MICRO4: Spec = {"batch": {"microbatches": 4}}
SEQUENCE: Spec = {"activations": {"{layers.0,norm,embed}": {1: "tp"}}}
VOCAB: Spec = {"shard": {"embed": "vocab", "head": "column"}}
PIPE: Spec = {"pipeline": {"axis": "pp", "stages": 2, "schedule": "1f1b"}, **MICRO}
EXPERTS: Spec = {"experts": [{"match": "experts", "axis": "ep"}]}
EACH: Spec = {"checkpoint": [{"match": "layers.*", "save": []}]}
INNER = {"experts.up": {1: {"axis": "tp", "split": 2}}, "experts.down": {2: {"axis": "tp"}}}
