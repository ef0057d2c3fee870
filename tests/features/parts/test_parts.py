"""Parts with their own meshes, on the same ranks and as stages: equal to one device, with few bytes at the border."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.ir.graph import source_of
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.spec import Spec
from tests import zoo
from tests.features.parts import families
from tests.features.parts.families import FAMILIES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Seer(nn.Module):
    """An encoder of patches, and layers over its results and over words."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(12, 32), Block(), Block())
        self.words, self.layers, self.head = nn.Embedding(48, 32), nn.Sequential(Block(), Block()), nn.Linear(32, 48)

    def forward(self, patches: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.vision(patches), self.words(ids)], 1)
        logits = self.head(self.layers(x))[:, patches.shape[1] :]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


ROWS = 24
PIPELINE = {"axis": "pp", "cut": ["layers"]}


@lru_cache(maxsize=1)
def seer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = zoo.ready(Seer(), torch.float64)
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(ROWS, 4, 12, generator=generator, dtype=torch.float64)
    return model, {"patches": patches, "ids": torch.randint(0, 48, (ROWS, 8), generator=generator)}


def program(mesh: dict[str, int], **spec: Any) -> Program:
    return shardc.compile(*seer(), {"shardc": 1, "mesh": mesh, "shard": {"use": "structure"}, **spec})


def vision(**mesh: int) -> dict[str, Any]:
    return {"vision": {"modules": "vision", "mesh": mesh}}


def assert_right(p: Program) -> None:
    proof, report = p.prove(), p.verify()
    assert proof.ok, str(proof)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("name", "pair", "apart"),
    [
        ("llava", 2, False),
        ("llava", 8, True),
        ("qwen2_vl", 2, False),
        ("qwen2_vl", 5, True),
        ("whisper", 5, False),
        ("whisper", 6, True),
        ("clip", 10, False),
        ("t5", 1, True),
        ("teacher", 4, True),
        ("teacher", 9, False),
    ],
)
def test_families_equal_one_device(name: str, pair: int, apart: bool) -> None:
    assert_right(families.compiled(FAMILIES[name], families.spec(FAMILIES[name], pair, apart=apart)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"])
def test_stages_on_their_own_meshes_run_by_every_schedule(schedule: str) -> None:
    twice = schedule in ("interleaved", "zb-v", "dualpipe-v")
    cut = ["vision.2", "layers.0", "layers.1"] if twice else ["layers"]
    pipeline = {"axis": "pp", "cut": cut, "schedule": schedule, "meshes": {0: {"dp": 4}, len(cut): {"tp": 4}}}
    p = program({"pp": 2, "dp": 1, "tp": 4}, pipeline=pipeline, batch={"microbatches": 2 if twice else 3})
    assert_right(p)


def test_a_spec_of_parts_and_meshes_is_read_back() -> None:
    pipeline = {**PIPELINE, "meshes": {0: {"dp": 2}}}
    document = {"shardc": 1, "mesh": {"pp": 2, "dp": 1, "tp": 2}, "pipeline": pipeline, "parts": vision(dp=2)}
    spec = Spec.load(document)
    assert Spec.load(spec.to_dict()) == Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("first", "second"),
    [({"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}), ({"dp": 6}, {"tp": 6}), ({"tp": 6}, {"dp": 2, "tp": 3})],
)
def test_meshes_of_six_share_digits_of_two_and_three(first: dict[str, int], second: dict[str, int]) -> None:
    pipeline = {**PIPELINE, "meshes": {0: first, 1: second}}
    p = program({"pp": 2, "dp": 1, "tp": 6}, pipeline=pipeline, uneven="pad", data={"zero": 3})
    assert_right(p)


@pytest.mark.parametrize(
    ("mesh", "first", "second"),
    [
        ({"dp": 2, "tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}),
        ({"dp": 1, "tp": 4}, {"tp": 4}, {"dp": 4}),
        ({"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"tp": 4}),
        ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}),
    ],
)
def test_each_element_crosses_once_between_stages(
    mesh: dict[str, int], first: dict[str, int], second: dict[str, int]
) -> None:
    p = program({"pp": 2, **mesh}, pipeline={**PIPELINE, "meshes": {0: first, 1: second}}, batch={"microbatches": 2})
    crossing = [n.meta for n in p.stages[1].graph.find_nodes(op="placeholder") if "collective" in n.meta]
    assert crossing
    for meta in crossing:
        assert meta["collective"].bytes * math.prod(mesh.values()) == meta["value"].nbytes()


def test_a_part_on_the_same_ranks_sends_its_rows_once() -> None:
    """Nothing is sent inside of the encoder, and the gather behind it is what tensor parallelism sends anyway."""
    kinds = {}
    for parts in ({}, vision(dp=4)):
        p = program({"dp": 2, "tp": 2}, parts=parts, strict=True)
        assert_right(p)
        nodes = [n for n in p.stages[0].graph.nodes if "collective" in n.meta]
        inside = [n for n in nodes if source_of(n).module.startswith("vision.")]
        kinds[bool(parts)] = len(inside), sum(n.meta["collective"].bytes for n in nodes)
    assert kinds[False][0] > 0 == kinds[True][0]
    assert kinds[True][1] <= kinds[False][1]


def test_zero_shards_over_all_axes_that_split_the_rows() -> None:
    p = program({"dp": 2, "tp": 2}, parts=vision(dp=4), data={"zero": 3})
    of_vision = {p.buckets[x.bucket].shard for x in p.params if x.fqn.startswith("vision.")}
    assert of_vision == {"dp+tp"}
    assert program({"dp": 2, "tp": 2}, parts=vision(dp=-1), data={"zero": 3}).buckets == p.buckets
    assert {p.buckets[x.bucket].shard for x in p.params if x.fqn.startswith("head.")} == {"dp"}
    assert_right(p)


def trained(p: Program, folder: Path, steps: int) -> list[float]:
    """Return the losses of steps that go on from a checkpoint in a folder, if it has one, and save another there."""
    model, batch = seer()

    def work(mesh: LoopbackMesh) -> list[float]:
        def sgd(params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, 0.05, momentum=0.9)

        engine = p.engine(copy.deepcopy(model), sgd, mesh=mesh)
        if (folder / "checkpoint").exists():
            engine.load(folder / "checkpoint")
        losses = [float(engine.step(batch)) for _ in range(steps)]
        engine.save(folder / "checkpoint")
        return losses

    return loopback(p.mesh, work)[0]


def test_a_run_goes_on_with_parts_without_them_and_in_stages(tmp_path: Path) -> None:
    apart = {**PIPELINE, "meshes": {0: {"dp": 2}}}
    programs = [
        program({"dp": 2, "tp": 2}, parts=vision(dp=4), data={"zero": 3}),
        program({"pp": 2, "dp": 1, "tp": 2}, pipeline=apart, data={"zero": 2}, batch={"microbatches": 2}),
        program({"dp": 2}, shard={}),
    ]
    losses = [x for p in programs for x in trained(p, tmp_path / "many", 2)]
    assert losses == pytest.approx(trained(program({"dp": 1}, shard={}), tmp_path / "one", 6), rel=1e-12)


@pytest.mark.parametrize(
    ("mesh", "wide", "microbatches"),
    [({"dp": 5, "tp": 2}, 10, 1), ({"dp": 2, "tp": 2}, 4, 5), ({"dp": 1, "tp": 7}, 7, 1)],
)
def test_rows_that_ranks_do_not_divide_are_padded(mesh: dict[str, int], wide: int, microbatches: int) -> None:
    batch = {"microbatches": microbatches}
    assert_right(program(mesh, parts=vision(dp=wide), uneven="pad", batch=batch, data={"zero": 2}))


@pytest.mark.parametrize(
    ("mesh", "spec", "fault", "fix"),
    [
        ({"dp": 2, "tp": 2}, {"parts": vision(dp=2)}, "has 2 ranks, and `mesh` has 4", "product is 4"),
        ({"dp": 2, "tp": 2}, {"parts": vision(dp=-1, tp=-1)}, "are -1", "all but one"),
        ({"dp": 2, "tp": 2}, {"parts": vision(dp=-1, tp=3)}, "has 3 ranks, and `mesh` has 4", "that divide 4"),
        ({"dp": 2, "tp": 2}, {"parts": vision(dp=0)}, "cannot have size 0", "at least 1"),
        ({"dp": 2, "tp": 2}, {"parts": vision(dpp=4)}, "an axis 'dpp'", "did you mean 'dp'"),
        ({"tp": 4}, {"parts": vision(dp=4)}, "an axis 'dp'", "size 1 in `mesh` may be larger"),
        ({"dp": 4, "tp": 1}, {"parts": vision(dp=2, tp=2)}, "over fewer ranks than the mesh", "fewest data ranks"),
        ({"dp": 1, "tp": 16}, {"parts": vision(dp=16)}, "24 rows over 16 ranks", "a multiple of 16"),
        ({"dp": 2, "tp": 2}, {"parts": {"a": {"modules": "visoin", "mesh": {"dp": 4}}}}, "'visoin'", "'vision'"),
        ({"dp": 2, "tp": 2}, {"parts": {"a": {"mesh": {"dp": 4}}}}, "modules", ""),
        (
            {"pp": 2, "dp": 1, "tp": 2},
            {"pipeline": {"axis": "pp", "stages": 2, "meshes": {0: {"dp": 2}}}},
            "stages of each op",
            "cut: [",
        ),
        (
            {"pp": 2, "dp": 1, "tp": 2},
            {"pipeline": {**PIPELINE, "meshes": {2: {"dp": 2}}}},
            "no stage 2",
            "stages are 0 to 1",
        ),
        (
            {"pp": 2, "dp": 1, "tp": 2},
            {"pipeline": {**PIPELINE, "meshes": {0: {"pp": 2}}}},
            "an axis 'pp'",
            "the axes are dp, tp",
        ),
    ],
)
def test_errors(mesh: dict[str, int], spec: dict[str, Any], fault: str, fix: str) -> None:
    with pytest.raises(ShardcError) as e:
        program(mesh, **spec)
    assert fault in str(e.value)
    assert fix in str(e.value)


class Albums(nn.Module):
    """Four patches of three images in each row: an encoder sees three times as many rows as the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.layers = nn.Sequential(nn.Linear(12, 32), Block()), nn.Sequential(Block(), nn.Linear(32, 8))

    def forward(self, images: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen = self.vision(images.flatten(0, 1))
        return nn.functional.mse_loss(self.layers(seen.reshape(y.shape[0], -1, seen.shape[-1])).mean(1), y)


def test_images_of_a_row_are_split_over_more_ranks_than_rows() -> None:
    """They are gathered behind the border, as rows of the batch do not divide. `tp` splits no weight of the encoder."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 4, 3, 12, generator=generator, dtype=torch.float64)
    batch = {"images": images, "y": torch.randn(4, 8, generator=generator, dtype=torch.float64)}
    spec = {
        "shardc": 1,
        "mesh": {"dp": 4, "tp": 2},
        "shard": {"use": "structure"},
        "activations": {"*.1": {1: "tp"}},
        "parts": vision(dp=8),
    }
    p = shardc.compile(zoo.ready(Albums(), torch.float64), batch, spec)
    assert_right(p)
    split = [n for n in p.stages[0].graph.nodes if source_of(n).module == "vision.0" and "value" in n.meta]
    assert split
    assert {n.meta["value"].local_shape(p.mesh)[0] for n in split} == {2}
