"""To delete an optional feature is to delete its folder: all else works, and what needs the feature says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardc
from shardc.optional import FEATURES
from tests import zoo

ROOT = Path(__file__).parents[2]
#: A spec for a GPT of which each feature puts something into the program, and what needs the feature.
USES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "matrices": ({"optimizer": {"matrices": "whole"}}, ["shardc.compile(model, batch, spec | {'optimizer': {}})"]),
    "adapters": (
        {"adapters": [{"match": "*.fc", "rank": 2}]},
        [
            "shardc.compile(model, batch, spec | {'adapters': {}})",
            "shardc.compile(model, batch, spec | {'freeze': {}})",
        ],
    ),
    "sequence": ({}, ["shardc.compile(model, batch, spec | {'sequence': {'axis': 'cp'}})"]),
    "fp8": (
        {"precision": {"products": "mxfp8"}},
        ["shardc.compile(model, batch, spec | {'precision': {'products': 'mxfp8'}})"],
    ),
    "reshard": ({}, ["program.reshard(one)", "loopback(one.mesh, move)"]),
    "generation": ({}, ["loopback(one.mesh, lambda mesh: one.engine(model, mesh=mesh).generate([[1, 2]]))"]),
}
#: Runs first: imports fail as they do when the feature's folder is not there.
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith("shardc.features.FEATURE."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
#: Compiles a small GPT, steps it on one device and on four ranks, and a compiled folder of it.
STEPS = """
import shardc, torch
from shardc.verify.equality import difference
from tests import zoo

model, batch = zoo.gpt()
spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
with zoo.Wide():
    one = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}})
    program = shardc.compile(model, batch, spec)
program.save("FOLDER")
a = shardc.simulate(one, model, batch)
for p in program, shardc.load("FOLDER"):
    b = shardc.simulate(p, model, batch)
    assert a.grads.keys() == b.grads.keys() and a.grads
    assert difference(a.loss, b.loss) <= 1e-12
    assert all(difference(g, b.grads[n]) <= 1e-12 for n, g in a.grads.items())
"""
#: Each of these raises, and nothing else imports the feature.
NEEDS = """
from shardc.runtime.mesh.loopback import loopback

def move(mesh):
    engine = one.engine(model, mesh=mesh)
    return engine.weights_to(engine)

for use in USES:
    try:
        eval(use)
    except shardc.ShardcError as e:
        assert "the feature FEATURE" in str(e) and "is not installed" in str(e), e
    else:
        raise AssertionError(use)
assert not [m for m in sys.modules if m.startswith("shardc.features.FEATURE")]
print("all else works")
"""


@pytest.mark.parametrize("feature", FEATURES)
def test_all_else_works_without_the_folder(feature: str, tmp_path: Path) -> None:
    assert (ROOT / "shardc" / "features" / feature / "__init__.py").is_file()
    more, uses = USES[feature]
    if more:
        program = shardc.compile(*zoo.gpt(), {"shardc": 1, "mesh": {"dp": 2}, **more}, prove=False)
        program.save(tmp_path / "with")
        uses = [*uses, f"shardc.load({str(tmp_path / 'with')!r})"]
    code = HIDE + STEPS + NEEDS.replace("USES", repr(uses))
    code = code.replace("FEATURE", feature).replace("FOLDER", str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "all else works\n", done.stderr[-3000:]


def test_every_folder_is_a_feature() -> None:
    folders = {f.parent.name for f in (ROOT / "shardc" / "features").glob("*/__init__.py")}
    assert folders == set(FEATURES)
    assert {f.name for f in (ROOT / "tests" / "features").iterdir() if f.is_dir()} - {"__pycache__"} == folders
    assert all((ROOT / "docs" / "how-to" / f"{feature}.md").is_file() for feature in FEATURES)
