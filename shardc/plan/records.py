"""What was found out about one model, kept in memory and on disk: dry runs of its programs, which no device has a part
in; prices on a device; what its graph is made of. Every answer is found out once.

A second question about the same model, in this process or another, starts from these: with other devices, another
number of them, another batch, less memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
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
from shardc.plan.workers import Workers
from shardc.spec import Spec

if TYPE_CHECKING:
    from shardc.plan.compiled_ranks import CompiledRanks
    from shardc.plan.few_layers import Subject


class Weights(NamedTuple):
    """What an estimate needs to know of a stage's weights. casts: bytes of them in the dtype of products, which are
    kept for backward once a step, and copies: how many ops make them; plain: bytes of those that are used as they are
    stored, as an embedding's table; experts: of the parameters that are experts', spread over an axis of theirs.
    buckets, experts_buckets: into how many buckets of the smallest size they go, of what is not experts', and of what
    is; what fills a part of one counts as that. together: bytes of those that one op uses with others, each in buckets
    of its own, as experts' are; together_buckets: how many these are. trained: bytes of those that get gradients.
    """

    casts: float = 0.0
    copies: float = 0.0
    plain: float = 0.0
    experts: float = 0.0
    buckets: float = 0.0
    experts_buckets: float = 0.0
    together: float = 0.0
    together_buckets: float = 0.0
    trained: float = 0.0


@dataclass(frozen=True)
class Rank:
    """The dry run of one rank, and what its price needs of the program. roles: of the mesh's axes."""

    run: DryRun
    mesh: Mesh
    roles: Mapping[str, str]
    weights: Weights


@dataclass
class Records:
    """source: the model. cpu: its device is one, which runs other kernels. disk: None keeps nothing there. processes:
    in so many dry runs are made. reserved: what an allocator takes (shardc.plan.reserved_bytes), by the step and the
    room for it.
    """

    source: Source
    cpu: bool = False
    disk: DiskCache | None = None
    processes: int = 1
    reserved: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)
    _texts: dict[str, bytes] = field(default_factory=dict)
    _looking: bool = False

    def __post_init__(self) -> None:
        self._workers = Workers(self._answered, self.processes)

    @property
    def subject(self) -> Subject:
        return self.source.subject

    @property
    def compiled(self) -> CompiledRanks:
        """Finds out what is not known yet."""
        if self._looking:
            raise _Unknown("", {})
        return self._compiled

    @cached_property
    def _compiled(self) -> CompiledRanks:
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
            if self._looking and "ranks" in question:
                raise _Unknown(key, question)
            data = self._workers.take(key)
            known = unpacked(data) if data is not None else _outcome(find)
            data = data or packed(known)
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
        found = self.answer(question, lambda: self._ranks(question))
        mesh = Mesh(tuple((a, n) for a, n in found["mesh"]))
        runs = [traces.decoded(r) for r in found["runs"]]
        each = zip(runs, found["weights"], strict=True)
        return [Rank(run, mesh, found["roles"], Weights(*weights)) for run, weights in each]

    def _ranks(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return self.compiled.ranks(*(question[k] for k in ("ranks", "rows", "units", "sequence", "at")))

    # --- in other processes, before they are asked

    def begin(self, now: Callable[[], object], likely: Iterable[Callable[[], object]]) -> None:
        """Begin with dry runs that are likely to be asked for, in other processes that have nothing to do, if what is
        asked for now takes a dry run, too. likely: what asks for them, the most likely first; of each the first dry run
        that is not known is made.
        """
        if self.processes > 1 and (here := self._first(now)) is not None:
            there = (unknown for ask in likely if (unknown := self._first(ask)) is not None)
            self._workers.begin((u.name, u.question) for u in there if u.name and u.name != here.name)

    def _first(self, ask: Callable[[], object]) -> _Unknown | None:
        self._looking = True
        try:
            ask()
        except _Unknown as e:
            return e
        except ShardcError:
            return None
        finally:
            self._looking = False
        return None

    def _answered(self, question: Mapping[str, Any]) -> bytes:
        """In a worker."""
        return packed(_outcome(lambda: self._ranks(question)))

    def close(self) -> None:
        """End other processes. They begin again where they are of use."""
        self._workers.close()


class _Unknown(Exception):
    """question: what would have to be found out, and its name; "": more than a dry run."""

    def __init__(self, name: str, question: Mapping[str, Any]) -> None:
        self.name, self.question = name, question


def _outcome(find: Callable[[], Any]) -> dict[str, Any]:
    """What a question comes to, as plain values: what is found, or why compile refuses it."""
    try:
        return {"found": find()}
    except ShardcError as e:
        return {"errors": e.to_json() if e.errors == (e,) else [x.to_json()[0] for x in e.errors]}


def spec_text(spec: Spec) -> str:
    """A spec as JSON, with its mesh's sizes."""
    return json.dumps({**spec.to_dict(), "mesh": dict(spec.mesh.axes)})
