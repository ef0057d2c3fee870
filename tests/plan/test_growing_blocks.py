"""What an allocator reserves where a block is larger with more layers than in the few that are run."""

from __future__ import annotations

from shardc.cost import device
from shardc.cost.recorded import DryRun
from shardc.machine.work import Part, Storage
from shardc.plan.exact_price import _whole, price
from shardc.plan.growing_blocks import become, growing, with_sizes, without
from shardc.plan.space import Choice, spec
from shardc.runtime.schedule import Action
from shardc.spec import Spec
from tests.plan.test_monotone import planner


def run(resident: list[Storage], *made: Storage) -> DryRun:
    changes = [(sign, s) for sign in (1, -1) for s in made]
    forward = Part("F", changes)
    return DryRun(0, 0, tuple(resident), Part(""), ((Action("F", 0, 0), forward),), Part(""), Part(""), "")


def test_storages_of_two_runs_are_told_apart() -> None:
    """Two layers and three: a bucket that has become larger, a layer that is there once more, and what is as it was."""

    def storages(layers: int) -> tuple[Storage, list[Storage], list[Storage]]:
        bucket = Storage(100 + 50 * layers, "gradients")
        return bucket, [Storage(70, "parameters") for _ in range(layers)], [Storage(8, "activations")]

    (b2, p2, a2), (b3, p3, a3) = storages(2), storages(3)
    two, three = run([*p2, b2], *a2), run([b3, *p3], *a3)
    assert become(two, three) == {b2: b3, p2[0]: p3[0], p2[1]: p3[1], a2[0]: a3[0]}
    assert growing(two, three) == {b2: (50, b3)}
    assert growing(three, two) == {}
    assert [s.nbytes for s in with_sizes(two, {b2: 500.0}).resident] == [70, 70, 500]
    assert without(two, [b2]).resident == (p2[0], p2[1])


def test_a_bucket_of_all_layers_is_as_large_as_with_all_of_them() -> None:
    """Gradients of three layers of eight are a bucket below the 1 MiB from which an allocator takes 20 MiB at once."""
    plans = planner(0, device("h100-80g"))
    choice = Choice(dp=4, zero=1, rows=2, checkpoint="sent", microbatches=1)
    one = Spec.load(spec(choice, plans.template))
    short, long = (price(plans.library.of_length(n), one, choice.batch).reserved for n in (64, 128))
    assert 0.9 < short / _whole(plans.library.of_length(64), one, choice.batch).reserved < 1.1
    assert short <= long


def test_no_bucket_is_larger_than_buckets_are() -> None:
    """Of layers whose gradients fill several, what the others hold is counted beside them."""
    plans = planner(2, device("h100-80g"))  # 8.4 MB of gradients a layer
    choice = Choice(dp=4, zero=1, rows=2, checkpoint="full", microbatches=1)
    one = Spec.load({**spec(choice, plans.template), "data": {"axis": "dp", "zero": 1, "bucket_mb": 20}})
    priced, whole = price(plans.library, one, choice.batch), _whole(plans.library, one, choice.batch)
    assert 0.9 < priced.reserved / whole.reserved < 1.1
