"""Check optimizers over whole matrices: each has one owner, and every element reaches it and returns.

`faults` (program.py) checks that the matrices of a parameter are all of it. All trained matrices are checked, whichever
of them an optimizer takes, on the routes that the runtime sends by (routes.py). What a rank stores comes from the
arithmetic of checkpoints.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from shardc.features.matrices.owners import work
from shardc.features.matrices.program import Matrix, of_param
from shardc.features.matrices.routes import Routes
from shardc.features.matrices.whole import routes_of
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.runtime.state.boxes import boxes_of, disjoint
from shardc.runtime.zero.flat_partition import FlatShards
from shardc.runtime.zero.trained_params import trained_params
from shardc.verify.static.gradient_sums import Wrong
from shardc.verify.static.text import TooLongError


def wrong(program: Program, until: float) -> Iterator[Wrong]:
    """Yield what is wrong. Raises TooLongError after `until` (perf_counter)."""
    if program.forward_only:
        return
    trained = [p for p in program.params if p.name in trained_params(program)]
    cut = {p.name: of_param(program, p) for p in trained}
    for coordinate in range(program.mesh.size(program.axis) if program.axis else 1):
        coords = dict.fromkeys(program.mesh.names, 0) | ({program.axis: coordinate} if program.axis else {})
        params = [p for p in trained if program.has(p, coords)]
        costs = {m: work(m.shape) for p in params for m in cut[p.name]}
        yield from _of_group(program, routes_of(program, program.mesh.rank(coords), costs), params, cut, until)


def _of_group(
    program: Program, routes: Routes, params: list[Param], cut: dict[str, tuple[Matrix, ...]], until: float
) -> Iterator[Wrong]:
    """Check the ranks that share the parameters of one stage."""
    stretches, places = FlatShards(program), range(len(routes.ranks))
    owners = Counter(m.name for m in routes.matrices)
    for p in params:
        if time.perf_counter() > until:
            raise TooLongError
        returned: defaultdict[int, int] = defaultdict(int)  # elements that come back, by rank
        for m in cut[p.name]:
            if owners[m.name] != 1 or routes.owners.get(m.name) not in places:
                yield m.name, f"{owners[m.name]} of its kind have an owner: it needs one"
                return
            arrived = [x for i in routes.sources(m) for x in routes.pieces(m, i)]
            boxes = ((x.box.offset, x.box.shape) for x in arrived)
            if sum(x.numel for x in arrived) != m.numel or not disjoint(boxes):
                yield m.name, "not every element of its gradient comes to its owner once"
                return
            for i in places:
                returned[i] += sum(x.numel for x in routes.pieces(m, i))
        for i in places:
            rank = routes.ranks[i]
            stored = boxes_of(p.shape, p.layout, stretches.of(p, rank), program.mesh, rank)
            if returned[i] != sum(box.numel for box in stored):
                yield p.fqn, f"rank {rank} stores elements of it that its owners do not send back"
                return
