"""Which cores a rank on the CPU computes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shardc.runtime.mesh import own_cores
from tests import warm


def test_ranks_share_the_cores_out() -> None:
    for cores, ranks in ((range(8), 2), (range(3, 10), 3), ({1, 4, 6}, 1)):
        shares = [own_cores.share(cores, rank, ranks) for rank in range(ranks)]
        assert {len(x) for x in shares} == {len(cores) // ranks}
        assert len(set().union(*shares)) == sum(map(len, shares))
        assert set().union(*shares) <= set(cores)
    assert own_cores.share({0, 1}, 3, 4) == set()


def test_threads_of_a_core_go_to_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors with two cores each, whose second hardware threads have the numbers from 4 on."""
    for i, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)] * 2):
        folder = tmp_path / f"cpu{i}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(own_cores, "_TOPOLOGY", str(tmp_path / "cpu{}" / "topology" / "{}"))
    assert [own_cores.share(range(8), rank, 2) for rank in range(2)] == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert [own_cores.share(range(8), rank, 4) for rank in range(4)] == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux only")
def test_a_process_and_its_threads_stay_there() -> None:
    warm.ranks(pinned, world=1)


def pinned(_: int) -> None:
    allowed = os.sched_getaffinity(0)
    own_cores.pin_process(0, len(allowed) + 1)
    assert os.sched_getaffinity(0) == allowed
    own_cores.pin_process(len(allowed) - 1, len(allowed))
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert (len(seen[0]) == 1 and seen[0] < allowed) or len(allowed) == 1, seen
