"""`shardc rules`: what it lists, what a check reports, its exit status, and what it says of mistakes."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from shardc.cli import app, model_file
from shardc.rules import RULES
from shardc.rules.core.registry import find
from tests.rules.samples import SAMPLES

OWN = """
import torch
from torch import Tensor
import shardc

@torch.library.custom_op("{lib}::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w

@scale.register_fake
def _(x, w):
    return torch.empty_like(x)

def backward(ctx, g):
    x, w = ctx.saved_tensors
    return g * w, (g * x).sum_to_size(w.shape)

scale.register_autograd(backward,
                        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

shardc.rule(scale, "{notation}", linear="{linear}", samples=[lambda: (torch.randn(4, 12), torch.randn(12))])
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own; rules that a test registers are gone after it."""
    monkeypatch.chdir(tmp_path)
    rules, samples = dict(RULES), dict(SAMPLES)
    yield tmp_path
    for table, before in ((RULES, rules), (SAMPLES, samples)):
        for op in [op for op in table if op not in before]:
            del table[op]
    find.cache_clear()


def own(path: Path, lib: str, notation: str = "... d, d -> ... d", linear: str = "0 | 1") -> str:
    path.write_text(OWN.format(lib=lib, notation=notation, linear=linear))
    return path.name


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["rules", *args])


# --- the list ---------------------------------------------------------------------------------------------------------


def test_lists_every_rule_with_its_place() -> None:
    done = call()
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith("aten.")}
    *linear, place = lines["aten.mm.default"]
    assert linear == ["aten.mm.default", "m", "k+,", "k+", "n", "->", "m", "n", "0", "|", "1", "flops"]
    assert place.startswith("shardc/rules/matmul.py:")
    assert {str(op) for op in RULES if str(op).startswith("aten.")} <= set(lines)
    assert "#   <embedding>: Split d and the ids: v! d, ... -> ... d." in done.stdout, (
        "what a function makes of a call is said once a family"
    )
    assert done.stdout.rstrip().endswith(
        "every other op that torch itself tags as elementwise: broadcasting, every dim splits"
    )


def test_the_list_as_json() -> None:
    rows = {r["op"]: r for r in json.loads(call("aten.linear", "aten.asinh", "aten.*pool1d*", "--json").stdout)}
    assert {"aten.linear.default", "aten.asinh.default", "aten.max_pool1d.default"} <= set(rows)
    linear = rows["aten.linear.default"]
    assert linear.pop("where").partition("matmul.py:")[2].isdigit()
    assert linear == {
        "op": "aten.linear.default",
        "notation": "... k+, n k+, n -> ... n",
        "linear": "<bias_or_not>",
        "family": "matmul",
        "extras": ["flops"],
        "about": {
            "<bias_or_not>": (
                "Return the linear operands: (input, bias) or (weight, bias) together; without a bias each alone."
            )
        },
    }


def test_ops_that_only_torchs_tag_finds_are_listed_by_name() -> None:
    assert torch.ops.aten.asinh.default not in RULES
    assert "<broadcast>" in call("aten.asinh").stdout


# --- the check --------------------------------------------------------------------------------------------------------


def test_check_without_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SAMPLES, torch.ops.aten.mm.default)
    done = call("aten.mm", "--check")
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert "there is no sample call of aten.mm.default on which its rule could be proven" in said
    assert "name a file that registers rules with samples (--file)" in said


def test_check_of_a_wrong_rule_of_ones_own(files: Path) -> None:
    file = own(files / "wrong.py", "wrong", linear="0 1")
    done = call("--check", "--file", file)
    assert done.exit_code == 1, done.output
    assert "WRONG wrong.scale.default, partial, 2 ranks: result 0: rank 0 differs by" in done.stdout
    assert "(f64[4, 12], f64[12])" in done.stdout
    assert "its rule: wrong.py:21" in done.stdout
    assert "1 rules on" in done.stdout, "with --file alone, only the file's"


def test_check_tells_what_is_too_strict(files: Path) -> None:
    file = own(files / "strict.py", "strict", "... d!, d! -> ... d!", "0")
    done = call("--check", "--file", file)
    assert done.exit_code == 0, done.output
    assert (
        "too strict: strict.scale.default, split d, 3 ranks: comes out right, but the rule forbids it"
        " (f64[4, 12], f64[12])" in done.stdout
    )
    assert "too strict: strict.scale.default, linear in 1, 3 ranks:" in done.stdout
    assert "0 wrong, 2 too strict" in done.stdout


def test_check_as_json(files: Path) -> None:
    done = call("--check", "--json", "--file", own(files / "own.py", "jsonlib", linear="0 1"))
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["ok"] is False
    (op,) = told["ops"]
    assert (op["op"], op["wrong"][0]["strategy"], op["calls"] > 3) == ("jsonlib.scale.default", "partial", True)


def test_own_rules_stand_last_with_their_place(files: Path) -> None:
    file = own(files / "listed.py", "listed")
    assert call("--file", file).stdout.splitlines()[-2:][-1].split() == [
        "listed.scale.default",
        "...",
        "d,",
        "d",
        "->",
        "...",
        "d",
        "0",
        "|",
        "1",
        "listed.py:21",
    ]
    both = call("aten.mm", "listed.*").stdout
    assert both.index("# matmul") < both.index("# own") < both.index("listed.scale.default")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "what", "fix"),
    [
        (["aten.sofmax"], "no op with a rule matches 'aten.sofmax'", "did you mean aten.softmax"),
        (["aten.mm.defalt", "--check"], "no op with a rule matches 'aten.mm.defalt'", "did you mean aten.mm.default"),
        (
            ["nothing.like.*"],
            "no op with a rule matches 'nothing.like.*'",
            "`shardc rules` lists all; --file loads yours",
        ),
        (["--file", "gone.py"], "there is no file gone.py", "name a Python file that registers rules"),
        (["--file", "empty.py"], "empty.py registers no rule", "shardc.rule(op, ...) where the op is defined"),
        (["--file", "bad.py"], "the rule '... d -> ... d' has 1", "one part per tensor operand"),
    ],
)
def test_mistakes(files: Path, args: list[str], what: str, fix: str) -> None:
    (files / "empty.py").write_text("import torch\n")
    own(files / "bad.py", "bad", "... d -> ... d", "0")
    done = call(*args)
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert "Traceback" not in said
    assert what in said
    assert fix in said


def test_a_file_that_is_read_again_keeps_its_ops(files: Path) -> None:
    """As a rank does that reads what another one compiled, and then the model."""
    file = files / "model_with_op.py"
    file.write_text(
        "import shardc, torch\n"
        '@torch.library.custom_op("test_rules::kept", mutates_args=())\n'
        "def kept(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x.clone()\n"
        "kept.register_fake(torch.empty_like)\n"
        'shardc.rule(kept, "... -> ...", linear="0", samples=[lambda: (torch.randn(4, 6),)])\n'
    )
    for _ in range(2):
        model_file.imported(str(file))
    gc.collect()
    assert find(torch.ops.test_rules.kept.default) is not None
