"""Check what engines and modules have in common: their weights, and what all ranks share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.ir.program import Program
from shardc.runtime.checks import marks, shared_facts, user_changes
from shardc.runtime.checks.hooks import CheckHooks, Model
from shardc.runtime.checks.optimizer_steps import observe
from shardc.runtime.mesh import agreement, replicas
from shardc.runtime.mesh.agreement import Fact
from shardc.runtime.state.sources import Weights


class Checks(CheckHooks):
    """The checks of an engine or a module: see CheckHooks. One rank only checks user code.

    made: the checked object in messages, "an engine" or "a module". copied: it is a copy of a module, such as an
    average of weights.
    """

    def __init__(self, program: Program, mesh: Any, made: str, *, copied: bool = False) -> None:
        self._program, self._mesh, self._made, self._copied = program, mesh, made, copied
        self.compares = mesh.layout.world > 1
        self._noted: set[str] = set()
        self._looks = 0
        self._weights = replicas.InitialFingerprints(program)
        self._same_rows = shared_facts.SameRows()
        self._check_every = 0

    def making(self, seed: int, **options: Any) -> None:
        if self.compares:
            self.call(f"making {self._made}", *shared_facts.program_facts(self._program, seed=seed, **options))
            self.call(f"making {self._made}", *shared_facts.joint_facts(self._program, self._mesh))

    def weights(self, model: Any, given: Weights) -> None:
        changed = user_changes.check_as_compiled(self._program, given.model, built=given.model is not model)
        self._note(changed)
        if self._program.eval_mode and self._program.check_attributes is not None:  # else the commands print it
            self._mesh.note(user_changes.EVAL_MODE)
        self.follow_model(model)

    def follow_model(self, model: Any) -> None:
        """Watch the source model of the weights for changes from now on."""
        self._source = user_changes.SourceModel(
            model, f"this {self._made.split()[-1]}", self._mesh.rank, copied=self._copied
        )
        observe(self._source)

    def _note(self, notes: user_changes.Notes) -> None:
        """Show notes, each once by its name."""
        for name, text in notes.items():
            if name not in self._noted:
                self._noted.add(name)
                self._mesh.note(f"{name}: {text}")

    def _look_at_model(self, modules: Iterable[tuple[str, Any]] = ()) -> None:
        """Refuse changed attributes that forward reads, and note changes of the model that do not reach the copy.

        modules: others with the captured model's attributes.
        """
        if (check := self._program.check_attributes) is not None:
            self._note(check() | check(modules))
        self._looks += 1
        if self._looks <= 8 or self._looks % 16 == 0:  # 1,000 modules take 4 ms, and these are notes
            for note in self._source.notes(self._noted):
                self._mesh.note(note)

    def whole_weight(self, x: Any, whole: Tensor) -> None:
        if self.compares:
            self._weights.whole(x, whole)

    def parts(self, parts: Iterator[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        return self._weights.passing(parts) if self.compares else parts

    def new_model(self, model: Any, module: nn.Module | None = None) -> None:
        self._model: Model = weakref.proxy(model)  # weak: a module's model holds these checks
        if self.compares and not self._copied:
            self._weights.check(self._mesh, model.buffers)
        self._watched = user_changes.WatchedParameters(model)

    def compare_every(self, steps: int) -> None:
        self._check_every = steps if self.compares else 0

    def call(self, name: str, *facts: Fact, steps: bool = False) -> None:
        if self.compares:
            agreement.check(self._mesh, [*facts, *(self._between_steps() if steps else ())], name)

    def _between_steps(self) -> list[Fact]:
        """Return facts that all ranks share between steps."""
        raise NotImplementedError

    def _compare_batch(self, call: str, batch: Any, *, local: bool) -> bool:
        """Compare a batch, and what was done since the last one; return whether parts have other numbers of rows."""
        facts = shared_facts.batch_facts(self._program, batch, local=local)
        equal_facts = self._compare(call, [*facts, *self._between_steps()])
        self._same_rows.look(self._program, batch, facts, equal_facts, self._mesh.note)
        rows = [f for f in facts if f.what == shared_facts.ROWS and agreement.slots_of(f, self._mesh.layout) > 1]
        return any(f not in equal_facts for f in rows)

    def _compare(self, call: str, facts: Sequence[Fact]) -> Sequence[Fact]:
        """Compare facts over ranks; return the equal ones of those that may differ."""
        return agreement.check(self._mesh, facts, call)

    def _compare_copies(self, call: str, optimizer: Optimizer | None) -> None:
        replicas.check_replicas(self._model, optimizer, call)

    def read_params(self) -> None:
        marks.watch_parameters(self._model)

    def gradients(self, *, user_reads: bool = False) -> None:
        marks.mark_gradients(self._model)

    def note_weights_read(self) -> None:
        self._source.weights_were_read = True
