"""What all tests share: one thread, golden texts, and which of many cases a run of everything takes (shares.py)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import once
from tests.proven import prove_all
from tests.shares import Recorder, take_shares

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the texts in tests/golden anew instead of comparing with them",
    )
    parser.addoption(
        "--fuzz", type=int, default=None, metavar="N", help="tests/test_any_spec.py: N random specs of every model"
    )
    parser.addoption("--fuzz-from", type=int, default=0, metavar="M", help="tests/plan: the first number that is drawn")
    parser.addoption("--all-families", action="store_true", help="tests/test_models_hf.py: every family and mesh")
    parser.addoption("--all-cases", action="store_true", help="every case of every test (tests/shares.py)")
    parser.addoption("--quick", action="store_true", help="one short test of each file (tests/shares.py)")
    parser.addoption("--write-seconds", action="store_true", help="write tests/seconds.json from this run")
    parser.addoption("--prove", type=Path, metavar="FILE", help="prove every program (tests/proven.py)")
    parser.addoption("--fuzz-models", default="", metavar="NAMES", help="... of these models only")


settings.register_profile("shardc", deadline=None, derandomize=True)  # no test fails for the time it takes
settings.load_profile("shardc")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tests run side by side
    config.addinivalue_line("markers", "every_case: no case is left out of a run of everything (tests/shares.py)")
    if config.getoption("--prove"):
        prove_all(config.getoption("--prove").absolute())
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    take_shares(config, items)


def pytest_collection_finish() -> None:
    """Tests make graphs of many small objects, and Python would look through all that was imported again and again
    (a sixth of the time)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests leave in caches is not looked through again either: late in a run of all tests `gc.collect`
    and `gc.get_objects` took seconds a call."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # native modules look for what is left of them when Python ends


@pytest.fixture(scope="session", autouse=True)
def nothing_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine's user has measured and planned (`~/.cache/shardc`) is not read, nor written."""
    base = tmp_path_factory.getbasetemp()
    once.FOLDER = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)`: the text is the one in tests/golden. A missing file fails; `--update-golden` writes
    it.
    """
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        assert file.exists(), f"no golden text {file}: run pytest --update-golden, and read what it wrote"
        assert text == file.read_text(encoding="utf-8"), f"{name} changed: if it should, run pytest --update-golden"

    return check
