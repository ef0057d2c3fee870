"""To delete an optional feature is to delete its folder: all else works, and what needs the feature says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import shardc
from shardc.optional import FEATURES
from tests import zoo

ROOT = Path(__file__).parents[2]
#: A spec for a GPT of which each feature puts something into the program, and what needs the feature.
USES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "matrices": (
        {"optimizer": {"matrices": "whole"}},
        ["shardc.compile(model, batch, spec | {'optimizer': {'matrices': 'whole'}})"],
    ),
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
    "choices": ({}, ["shardc.compile(model, batch, spec | {'choices': {'*': 'record'}})"]),
    "parts": ({}, ["shardc.compile(model, batch, spec | {'parts': {'a': {'modules': 'h.0', 'mesh': {'dp': 2}}}})"]),
    "reshard": ({}, ["program.reshard(one)", "loopback(one.mesh, move)"]),
    "generation": ({}, ["loopback(one.mesh, lambda mesh: one.engine(model, mesh=mesh).generate([[1, 2]]))"]),
    "hub": ({}, ["shardc.optional.needed('hub', 'upload', 'prepare')('org/name', None)"]),
    "trackers": ({}, ["__import__('shardc.cli.run', fromlist=['run'])._settings(program.spec.run, track=('wandb',))"]),
    "text": ({}, ["shardc.text.chats([], '', 8)"]),
    "rows": ({"batch": {"balance": True}}, ["shardc.compile(model, batch, spec | {'batch': {'balance': True}})"]),
}
#: A process that has what shardc takes of others, and of which each feature's is a fork: it imports shardc without the
#: feature's folder. Imports fail there as they do when the folder is not there.
FORKS = """
import os, sys, traceback
import torch, torch.export._trace, torch.fx.experimental.proxy_tensor, torch._inductor.fx_passes.joint_graph
import pydantic, yaml
import transformers.models.auto.modeling_auto

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(f"shardc.features.{feature}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def child():
    sys.meta_path.insert(0, Hidden())
    exec(compile(CODE, "the feature's steps", "exec"), globals())

assert not [m for m in sys.modules if m.split(".")[0] == "shardc"]
for feature, (folder, uses) in CASES.items():
    if not (pid := os.fork()):
        status = 1
        try:
            child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(pid, 0)[1] == 0:
        print(feature, flush=True)
"""
#: Compiles a small GPT, steps it on one device and on four ranks, and a compiled folder of it. Then each use raises,
#: and nothing else has imported the feature.
STEPS = """
import shardc
from shardc.runtime.mesh.loopback import loopback
from shardc.verify.equality import difference
from tests import zoo

model, batch = zoo.gpt(layers=1)
spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
with zoo.Wide():
    one = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}})
    program = shardc.compile(model, batch, spec)
program.save(folder)
a = shardc.simulate(one, model, batch)
for p in program, shardc.load(folder):
    b = shardc.simulate(p, model, batch)
    assert a.grads.keys() == b.grads.keys() and a.grads
    assert difference(a.loss, b.loss) <= 1e-12
    assert all(difference(g, b.grads[n]) <= 1e-12 for n, g in a.grads.items())

def move(mesh):
    engine = one.engine(model, mesh=mesh)
    return engine.weights_to(engine)

for use in uses:
    try:
        eval(use)
    except shardc.ShardcError as e:
        assert f"the feature {feature}" in str(e) and "is not installed" in str(e), e
    else:
        raise AssertionError(use)
assert not [m for m in sys.modules if m.startswith(f"shardc.features.{feature}")]
"""


def test_all_else_works_without_the_folder(tmp_path: Path) -> None:
    """Of each feature in turn."""
    cases = {}
    for feature, (more, uses) in USES.items():
        folder = tmp_path / feature
        if more:
            program = shardc.compile(*zoo.gpt(), {"shardc": 1, "mesh": {"dp": 2}, **more}, prove=False)
            program.save(folder / "with")
            uses = [*uses, f"shardc.load({str(folder / 'with')!r})"]
        cases[feature] = (str(folder / "out"), uses)
    code = FORKS.replace("CASES", repr(cases)).replace("CODE", repr(STEPS))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(FEATURES), done.stderr[-3000:]


def test_every_folder_is_a_feature() -> None:
    folders = {f.parent.name for f in (ROOT / "shardc" / "features").glob("*/__init__.py")}
    assert folders == set(FEATURES) == set(USES)
    assert {f.name for f in (ROOT / "tests" / "features").iterdir() if f.is_dir()} - {"__pycache__"} == folders
    assert all((ROOT / "docs" / "how-to" / f"{feature}.md").is_file() for feature in FEATURES)
