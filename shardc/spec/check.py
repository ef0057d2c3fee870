"""Check what the grammar cannot: axes against the mesh, sizes against each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardc.errors import Errors
from shardc.ir.mesh import MAX_RANKS, Mesh, is_data_axis
from shardc.ir.similar_names import nearest
from shardc.ir.units import multiples
from shardc.optional import registered
from shardc.spec.batch_section import Batch
from shardc.spec.data_section import Data
from shardc.spec.module_sections import EXPERTS_AXIS
from shardc.spec.schema import Form
from shardc.spec.shard_section import DimShard
from shardc.spec.yaml_reader import Path, Places, reach


def resolve_mesh(sizes: Mapping[str, int], world: int | None, places: Places, errors: Errors) -> Mesh | None:
    """Return the mesh with all sizes known, or None, with errors, if invalid. world: ranks, if known."""
    wrong = [a for a, n in sizes.items() if n < 1 and n != -1]
    for axis in wrong:
        where, fix = (
            places.where(("mesh", axis), value=True),
            "sizes are at least 1; -1 is computed from the world size",
        )
        errors.add(f"mesh axis {axis!r} cannot have size {sizes[axis]}", where=where, fix=fix)
    open_ = [a for a, n in sizes.items() if n == -1]
    for axis in open_[1:]:
        where = places.where(("mesh", axis), value=True)
        errors.add(
            f"only one size may be -1, and {open_[0]!r} is already", where=where, fix=f"write the size of {axis}"
        )
    if wrong or len(open_) > 1:
        return None
    known = math.prod(n for n in sizes.values() if n > 0)
    if known > MAX_RANKS:
        where = places.where(("mesh", max(sizes, key=lambda a: sizes[a])), value=True)
        errors.add(f"a mesh of {known:,} ranks is too large", where=where, fix=f"at most {MAX_RANKS:,}")
        return None
    if open_:
        where, axis = places.where(("mesh", open_[0]), value=True), open_[0]
        if world is None:
            fix = f"write the size, or give it: --mesh {axis}=N, run --nproc N, in Python mesh={{{axis!r}: N}}"
            fault = f"mesh size {axis}: -1 needs the world size, which is not known here"
            errors.add(fault, where=where, fix=fix)
            return None
        if world % known:
            fix = f"run {multiples(world, known)} ranks, or change the other sizes"
            errors.add(
                f"a world of {world} ranks is not divisible by the mesh's other sizes ({known})", where=where, fix=fix
            )
            return None
        return Mesh.of({a: world // known if n == -1 else n for a, n in sizes.items()})
    if world is not None and world != known:
        fits = [f"{a}={n}" for a, n in Mesh.of(sizes).fitting(world).items() if n != sizes[a]]
        fix = f"run {known} ranks" + (f", or write --mesh {fits[0]}" if fits else "")
        fault = f"the mesh has {known} ranks ({Mesh.of(sizes)}), and the world has {world}"
        errors.add(fault, where=places.where(("mesh",)), fix=fix)
        return None
    return Mesh.of(sizes)


#: Section -> what its dims split.
_SPLITS = {"shard": "weights", "activations": "activations", "outputs": "outputs"}


def token_axes(sections: Mapping[str, Any]) -> dict[str, Path]:
    """Return the axes that split each row of inputs, outermost first, with their places; sections: by name."""
    return {axis: path for axes in registered("section", "token_axes") for axis, path in axes(sections)}


def data_axes(batch: Batch, data: Data, names: Iterable[str], tokens: Collection[str]) -> tuple[str, ...]:
    """Return the axes that split the batch: batch.axes if set, else axes dp, dp_* and those of data.axis.

    tokens: the axes that split rows. They may be in data.axis too: then they shard parameters, and do not split the
    batch.
    """
    if batch.axes is not None:
        return batch.axes
    of_data = {a for a in data.axis if a not in tokens}
    return tuple(n for n in names if is_data_axis(n) or n in of_data)


@dataclass(frozen=True)
class Check:
    """The checks of one form. value: the spec as written, for the paths of mistakes.

    names: the axes of the mesh, also those with an invalid size; mesh: None if it has mistakes.
    """

    form: Form
    value: Any
    names: tuple[str, ...]
    mesh: Mesh | None
    places: Places
    errors: Errors

    def run(self) -> None:
        self.axes()
        self.default_axis()
        for path, dims in self.dims():
            self.one_value(path, dims)
        self.jobs()
        self.batch()
        self.pipeline()
        self.gathers()
        self.offload()
        self.lists()
        self.lengths()
        for check in registered("section", "check"):
            check(self)

    def lengths(self) -> None:
        """Require `pad` with `lengths`: only the user knows which numbers are neutral padding."""
        if self.form.batch.lengths and not self.form.batch.pad:
            fault = "padding batches to these lengths needs the numbers to pad with"
            fix = "write batch: {pad: {input_ids: 0, labels: -100}}, or leave lengths out"
            self.add(("batch", "lengths"), fault, fix)

    def add(self, path: Path, what: str, fix: str, *, value: bool = True) -> None:
        self.errors.add(what, where=self.places.where(path, value=value), fix=fix)

    def dims(self) -> Iterator[tuple[Path, dict[int, tuple[DimShard, ...]]]]:
        """Yield every {dim: axes} of the spec, with its path."""
        for pattern, rule in self.form.shard.rules.items():
            if rule.dims is not None:
                yield ("shard", pattern), rule.dims
        for key, dims in self.form.activations.items():
            yield ("activations", key), dims
        for name, layout in self.form.outputs.items():
            if layout is not None:
                yield ("outputs", name), layout

    def uses(self) -> Iterator[tuple[str, Path, str]]:
        """Yield every axis that the spec names: (axis, its path, what it splits)."""
        f = self.form
        for i, axis in enumerate(f.batch.axes or ()):
            yield axis, ("batch", "axes", i), "the batch"
        for i, axis in enumerate(f.data.axis):
            yield axis, ("data", "axis", i), "the batch"
        if f.shard.use and f.shard.use.axis is not None:
            yield f.shard.use.axis, ("shard", "use", "axis"), "weights"
        for pattern, rule in f.shard.rules.items():
            if rule.axis is not None:
                yield rule.axis, ("shard", pattern, "axis"), "weights"
        if f.shard.use and f.shard.use.axis is None and "tp" in self.names:
            yield "tp", ("shard", "use"), "weights"
        for pattern, rule in f.shard.rules.items():
            if rule.axis is None and rule.style not in (None, "replicate") and "tp" in self.names:
                yield "tp", ("shard", pattern), "weights"
        for path, dims in self.dims():
            for dim, shards in dims.items():
                for i, s in enumerate(shards):
                    yield s.axis, self.axis_path(path, dim, i), _SPLITS[str(path[0])]
        for axis, path in token_axes(dict(f)).items():
            yield axis, path, "the sequence"
        if f.pipeline:
            yield f.pipeline.axis, ("pipeline", "axis"), "the pipeline"
        for i, expert in enumerate(f.experts):
            yield expert.axis, ("experts", i, "axis"), "experts"

    def axis_path(self, path: Path, dim: int, i: int) -> Path:
        """Return the path of an axis as written: {0: tp}, {0: {axis: tp}}, {0: [dp, tp]} or with both."""
        return reach(self.value, (*path, dim, i, "axis"))

    def axes(self) -> None:
        for axis, path, _ in self.uses():
            if axis not in self.names:
                close = nearest(axis, self.names)
                known = f"the mesh's axes are {', '.join(self.names)}" if self.names else f"write mesh: {{{axis}: N}}"
                self.add(path, f"the mesh has no axis {axis!r}", f"did you mean {close!r}? {known}" if close else known)

    def default_axis(self) -> None:
        may_have_experts = (
            EXPERTS_AXIS in self.names or self.form.experts
        )  # a plan may have them: shardc.passes.annotate.model_plan
        if (use := self.form.shard.use) and use.axis is None and "tp" not in self.names and not may_have_experts:
            fix = self._other_than_tp(f"use: {{plan: {use.plan}, axis: ", "}")
            self.add(
                ("shard", "use"), f"`use: {use.plan}` splits over the axis 'tp', which the mesh does not have", fix
            )
        styled = [
            (p, r.style)
            for p, r in self.form.shard.rules.items()
            if r.style and r.style != "replicate" and r.axis is None
        ]
        if not styled or "tp" in self.names:
            return
        (pattern, style), others = styled[0], len(styled) - 1
        more = f" (and so do {others} more rules)" if others > 1 else " (and so does one more rule)" if others else ""
        fix = self._other_than_tp(f"{{style: {style}, axis: ", "}")
        self.add(("shard", pattern), f"`{style}` splits over the axis 'tp'{more}, which the mesh does not have", fix)

    def _other_than_tp(self, before: str, after: str) -> str:
        """Return the fix if the mesh has no tp: an axis without another use, if there is one."""
        taken = {axis for axis, _, job in self.uses() if job != "weights"} | set(
            data_axes(self.form.batch, self.form.data, self.names, token_axes(dict(self.form)))
        )
        free = [n for n in self.names if n not in taken]
        sizes = "".join(f"{n}: {self.form.mesh[n]}, " for n in self.names)
        return (
            f"write {before}{free[-1]}{after}, or add tp to the mesh"
            if free
            else f"write mesh: {{{sizes}tp: N}}; with tp: 1 nothing is split"
        )

    def one_value(self, path: Path, dims: dict[int, tuple[DimShard, ...]]) -> None:
        """Check one tensor's dims: every axis once; sections divide, and share their dim with no other axis."""
        seen: dict[str, int] = {}
        for dim, shards in dims.items():
            place = (*path, dim)
            if len(shards) > 1 and any(s.sections for s in shards):
                fix = "split a dim of sections over one axis only"
                self.add(place, f"dim {dim} is split twice, and once by sections", fix, value=False)
            for s in shards:
                if s.axis in seen:
                    fault = f"axis {s.axis!r} splits dim {seen[s.axis]} and dim {dim} of one tensor"
                    fix = f"an axis splits one dim, once: {{{seen[s.axis]}: {s.axis}}} or {{{dim}: {s.axis}}}"
                    if seen[s.axis] == dim:
                        fault = f"axis {s.axis!r} splits dim {dim} twice"
                        fix = f"an axis splits one dim, once: {{{dim}: {s.axis}}}"
                    self.add(place, fault, fix, value=False)
                seen.setdefault(s.axis, dim)
                if s.sections and s.split != 1:
                    fix = "split: n is for n equal parts, sections: [...] for unequal ones"
                    self.add(place, f"dim {dim} has both split and sections", fix, value=False)
                self.sections(place, s)

    def sections(self, place: Path, s: DimShard) -> None:
        size = self.mesh.size(s.axis) if self.mesh and s.axis in self.names else 1
        odd = [n for n in s.sections if n % size]
        if odd:
            common = math.gcd(*s.sections)
            fits = [str(n) for n in range(1, min(common, 2 * size) + 1) if common % n == 0]
            fix = f"{s.axis}={' or '.join(fits[-2:])}, or change the sections"
            self.add((*place, "sections"), f"the section of {odd[0]} is not divisible by {s.axis}={size}", fix)

    def jobs(self) -> None:
        """Check that the pipeline's axis splits nothing else, and that no axis splits batch and sequence.

        Pipeline stages run different programs.
        """
        pipeline = self.form.pipeline
        for axis, path, job in self.uses():
            if pipeline and axis == pipeline.axis and path != ("pipeline", "axis"):
                fault = f"axis {axis!r} is the pipeline's and cannot split {job} too"
                self.add(path, fault, "give the pipeline its own axis")
        tokens = token_axes(dict(self.form))
        batch = data_axes(self.form.batch, self.form.data, self.names, tokens)
        for axis, path in tokens.items():
            if axis in batch:
                fault = f"axis {axis!r} already splits the batch"
                self.add(path, fault, "give the sequence its own axis, e.g. cp")

    def batch(self) -> None:
        if self.form.batch.rows is not None and self.form.batch.microbatches > 1:
            fault = "`microbatches` and `rows` both say how many microbatches there are"
            self.add(("batch", "rows"), fault, "keep one of them", value=False)

    def pipeline(self) -> None:
        p = self.form.pipeline
        if p is None:
            return
        ways = {} if p.stages is None else {"stages": p.stages}
        ways |= {} if p.cut is None else {"cut": len(p.cut) + 1}
        ways |= {} if p.balance is None else {"balance": len(p.balance)}
        for key in list(ways)[1:]:
            fault = f"`{next(iter(ways))}` and `{key}` both say where to cut"
            self.add(("pipeline", key), fault, "keep one of stages, cut and balance", value=False)
        size = self.mesh.size(p.axis) if self.mesh and p.axis in self.names else 1
        for key, n in list(ways.items())[:1]:
            if n % size:
                fault = f"{n} stages do not spread evenly over {p.axis}={size}"
                self.add(("pipeline", key), fault, f"make it {multiples(n, size)} stages")

    def gathers(self) -> None:
        """Check that settings of gathered parameters have parameters that are split."""
        data = self.form.data
        for key, is_set in (("prefetch", data.prefetch != 1), ("keep", data.keep)):
            if is_set and data.zero != 3:
                fault = f"`{key}` needs zero: 3, which gathers parameters; this spec has zero: {data.zero}"
                self.add(("data", key), fault, "write zero: 3, or leave it out", value=False)

    def offload(self) -> None:
        """Check that offloaded parameters are sharded: ranks keep parts of them, gathered for use."""
        data, path = self.form.data, ("data", "offload", "parameters")
        if data.offload.parameters == "none":
            return
        if data.zero != 3:
            self.add(
                path,
                f"parameters can be offloaded at zero: 3 only; this spec has zero: {data.zero}",
                "write zero: 3, or parameters: none",
            )
        if not data.axis and not any(map(is_data_axis, self.names)):
            self.add(
                path,
                "the mesh has no data axis over which parameters are gathered",
                "add dp to the mesh; dp: 1 is enough",
            )

    def lists(self) -> None:
        for section, axes in (("batch", self.form.batch.axes or ()), ("data", self.form.data.axis)):
            for i, axis in enumerate(axes):
                if axis in axes[:i]:
                    key = "axes" if section == "batch" else "axis"
                    self.add((section, key, i), f"axis {axis!r} is listed twice", "list it once")
        for i, c in enumerate(self.form.checkpoint):
            keys = [k for k in ("save", "recompute", "budget") if getattr(c, k) is not None]
            if len(keys) > 1:
                self.add(
                    ("checkpoint", i, keys[-1]),
                    f"{' and '.join(f'`{k}`' for k in keys)} {'both' if len(keys) == 2 else 'all'} say what is kept",
                    "keep one of them",
                    value=False,
                )
