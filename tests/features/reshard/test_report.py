"""The text of a move is that of the move."""

from __future__ import annotations

import pytest

from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests.features.reshard.test_pairs import adamw, model, program


@pytest.mark.parametrize(
    ("a", "b"),
    [("dp=8 zero 3", "tp=2 dp=4 zero 1"), ("pp=2 dp=2 tp=2", "dp=4 tp=2 zero 1 bf16"), ("dp=4 tp=2 zero 1 bf16",) * 2],
)
def test_bytes_are_those_that_are_sent(a: str, b: str) -> None:
    old, new, source = program(a), program(b), model()

    def work(mesh: LoopbackMesh) -> tuple[list[int], list[int], int]:
        engine = old.engine(source, mesh=mesh)
        made = engine.weights_to(new.engine(source, adamw, mesh=mesh.seen_as(new.mesh)))
        return made.sent, made.received, made.rounds

    made, told = loopback(old.mesh, work), old.reshard(new)
    assert told.sent == tuple(tuple(sent) for sent, _, _ in made)
    assert [list(column) for column in zip(*told.sent, strict=True)] == [received for _, received, _ in made]
    assert {rounds for *_, rounds in made} == {told.rounds}
    assert ("nothing moves" in str(told)) == (a == b)


def test_the_text() -> None:
    told = program("dp=8 zero 3").reshard(program("tp=2 dp=4 zero 1"), moments=2)
    text = str(told).splitlines()
    assert text[0] == "dp=8 to tp=2 × dp=4, 8 ranks: weights, and 2 tensors for each trained one"
    assert sum(n for n, _ in told.by_axes.values()) == told.bytes == sum(told.sends) == sum(told.receives)
    assert len(text) == 5 + len(told.by_axes)
    assert told.seconds("h100-80g") < told.seconds("a100-80g")


def test_what_is_no_number() -> None:
    with pytest.raises(ShardcError, match="must be a number of tensors"):
        program("dp=8 zero 3").reshard(program("dp=8 zero 3"), moments=-1)
