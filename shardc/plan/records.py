"""What was found out about one model, kept in memory and on disk: dry runs of its programs, which no device has a part
in; prices on a device; what its graph is made of. Every answer is found out once.

A second question about the same model, in this process or another, starts from these: with other devices, another
number of them, another batch, less memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from shardc.cost.recorded import DryRun
from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh
from shardc.plan import traces
from shardc.plan.disk_cache import DiskCache, packed, unpacked
from shardc.plan.facts import Facts
from shardc.plan.source import Source
from shardc.spec import Spec

if TYPE_CHECKING:
    from shardc.plan.compiled_ranks import CompiledRanks
    from shardc.plan.few_layers import Subject


class Weights(NamedTuple):
    """What an estimate needs to know of a stage's weights. casts: bytes of them in the dtype of products, which are
    kept for backward once a step, and copies: how many ops make them; plain: bytes of those that are used as they are
    stored, as an embedding's table; experts: of the parameters that are experts', spread over an axis of theirs.
    """

    casts: float = 0.0
    copies: float = 0.0
    plain: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class Rank:
    """The dry run of one rank, and what its price needs of the program. roles: of the mesh's axes."""

    run: DryRun
    mesh: Mesh
    roles: Mapping[str, str]
    weights: Weights


@dataclass
class Records:
    """source: the model. cpu: its device is one, which runs other kernels. disk: None keeps nothing there. reserved:
    what an allocator takes (shardc.plan.reserved_bytes), by the step and the room for it.
    """

    source: Source
    cpu: bool = False
    disk: DiskCache | None = None
    reserved: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)
    _texts: dict[str, bytes] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        return self.source.subject

    @cached_property
    def compiled(self) -> CompiledRanks:
        """Finds out what is not known yet."""
        from shardc.plan.compiled_ranks import CompiledRanks

        return CompiledRanks(self.subject, self.cpu)

    @cached_property
    def facts(self) -> Facts:
        """Raises ShardcError as capture does."""
        return Facts.read(self.answer({"facts": "of the graph"}, lambda: self.compiled.facts()))

    def treats_layers_alike(self, spec: Spec) -> bool:
        """Whether a spec says the same of every layer: only then are few layers like many. Not so with `every: 2`, or
        with a pattern that names single layers, nor where matrices have owners, which are balanced over all layers.
        """
        if self.facts.layers is None:
            return True
        if spec.optimizer.matrices is not None or any(entry.every > 1 for entry in spec.checkpoint):
            return False
        patterns = {r.pattern for r in spec.shard} | {r.pattern for r in spec.activations}
        patterns |= {e.match for e in spec.experts} | {e.match for e in spec.checkpoint}
        question = {"match layers alike": sorted(patterns)}
        return bool(self.answer(question, lambda: self.subject.match_layers_alike(patterns)))

    @cached_property
    def _model(self) -> str | None:
        """What files on disk are looked up by, of this model; None: nothing is."""
        return self.source.fingerprint(self.disk) if self.disk is not None else None

    def answer(self, question: Mapping[str, Any], find: Callable[[], Any]) -> Any:
        """The answer to a question of plain values: as it is known, else what `find` returns, plain values too. What
        compile refused before it refuses again: raises ShardcError.
        """
        key = json.dumps(question)  # in its order: that of a mesh's axes counts
        named = {"model": self._model, "question": key}
        disk = self.disk if self._model is not None else None
        data = self._texts.get(key) or (disk.packed(named) if disk is not None else None)
        known = unpacked(data) if data is not None else None
        if known is None:
            try:
                known = {"found": find()}
            except ShardcError as e:
                known = {"errors": e.to_json() if e.errors == (e,) else [x.to_json()[0] for x in e.errors]}
            data = packed(known)
            if disk is not None:
                disk.keep(named, data)
        assert data is not None
        self._texts[key] = data
        if "errors" in known:
            errors = Errors()
            for each in known["errors"]:
                errors.add(each["what"], where=each["where"], fix=each["fix"])
            errors.raise_any()
        return known["found"]

    def ranks(
        self, spec: Mapping[str, Any], rows: int, units: int | None, sequence: int | None, coordinates: tuple[int, ...]
    ) -> list[Rank]:
        """Ranks of the program of a spec for a global batch of so many rows: of the whole model, or of so many units of
        its layers; by their coordinates on the pipeline's axis. Raises ShardcError if compile does.
        """
        question = {"ranks": spec, "rows": rows, "units": units, "sequence": sequence, "at": coordinates}
        question["cpu"] = self.cpu
        found = self.answer(question, lambda: self.compiled.ranks(spec, rows, units, sequence, coordinates))
        mesh = Mesh(tuple((a, n) for a, n in found["mesh"]))
        runs = [traces.decoded(r) for r in found["runs"]]
        each = zip(runs, found["weights"], strict=True)
        return [Rank(run, mesh, found["roles"], Weights(*weights)) for run, weights in each]


def spec_text(spec: Spec) -> str:
    """A spec as JSON, with its mesh's sizes."""
    return json.dumps({**spec.to_dict(), "mesh": dict(spec.mesh.axes)})
