"""The command line: what it prints, its exit status, and that no mistake of a user's ever shows a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner, Result

import shardc
from shardc.cli import app, common
from shardc.cli.ranks import worker
from shardc.cli.ranks.job import Job
from shardc.errors import ShardcError
from shardc.runtime.launch import free_port
from shardc.runtime.mesh import presence
from tests import warm

#: Other tests extend it: the last definition of a name counts.
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()

def model():
    return Net()

def batch():
    return {"x": torch.ones(4, 8)}
"""
SPEC = "shardc: 1\nmesh: {dp: 2, tp: 2}\nshard:\n  up: column\n  down: row\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_a_device_that_there_is_not_is_an_error_of_every_view(files: Path) -> None:
    for view in ([], ["--schedule"], ["--json"]):
        done = call("inspect", "model.py", "spec.yaml", *view, "--device", "h100-80")
        assert done.exit_code == 2
        assert "did you mean 'h100-80g'" in done.output


def test_weights_in_the_place_of_a_checkpoint(files: Path) -> None:
    (files / "w.safetensors").write_bytes(b"")
    done = call("run", "model.py", "spec.yaml", "--resume", "w.safetensors")
    assert done.exit_code == 2
    assert "to start a run with these weights, write --weights w.safetensors" in flat(done.output)


# --- what works -------------------------------------------------------------------------------------------------------


def test_compile_prints_the_program(files: Path) -> None:
    done = call("compile", "model.py", "spec.yaml")
    assert done.exit_code == 0, done.output
    assert "ops.all_reduce" in done.stdout
    assert "spec.yaml:5:3 'down': row" in done.stdout


def test_compile_inspect_and_verify_an_artifact(files: Path) -> None:
    done = call("compile", "model.py", "spec.yaml", "-o", "out", "--dump", "passes")
    assert done.exit_code == 0, done.output
    assert "dp=2 × tp=2: 4 ranks" in done.stdout
    assert "\nproven equal to one device" in done.stdout
    assert (files / "out" / "stage0.py").exists()
    assert (files / "passes" / "05-partition.diff").exists()
    assert call("inspect", "out").stdout == call("inspect", "model.py", "spec.yaml").stdout
    assert "gradients, in buckets" in call("inspect", "out", "--comm").stdout
    assert "def single(" in call("inspect", "out", "--before").stdout
    assert (
        "def single(" in call("inspect", "model.py", "--before").stdout
    )  # what errors of patterns send to: no spec is right yet
    assert "ops.all_reduce" in call("inspect", "model.py", "spec.yaml", "--diff", "partition").stdout
    assert call("inspect", "out", "--html", "page.html").exit_code == 0
    assert (files / "page.html").read_text().startswith("<!doctype html>")
    done = call("verify", "out")
    assert done.exit_code == 0
    assert "equal to one device" in done.stdout


def test_the_summary_names_the_stages_and_the_proof_that_is_left(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.cli.compile.PROOF_SECONDS", -1.0)
    done = call(
        "compile",
        "model.py",
        "spec.yaml",
        "--set",
        "mesh={pp: 2, dp: 1, tp: 2}",
        "--set",
        "batch.microbatches=2",
        "--set",
        "pipeline={axis: pp, stages: 2, schedule: 1f1b}",
        "-o",
        "out",
    )
    assert "stages: up.weight .. up.bias | down.weight .. down.bias" in done.stdout, done.output
    assert "not proven yet: run `shardc verify out --static`, which takes longer" in done.stdout


@pytest.mark.parametrize("command", ["compile", "inspect", "verify"])
def test_json_is_one_document_and_nothing_else(files: Path, command: str) -> None:
    done = call(command, "model.py", "spec.yaml", "--json")
    assert done.exit_code == 0
    assert isinstance(json.loads(done.stdout), dict)


def test_forward_only(files: Path) -> None:
    (files / "model.py").write_text(
        MODEL.replace("return self.down(torch.relu(self.up(x))).square().mean()", "return self.down(self.up(x))")
        + """
def loss(output, batch):
    return nn.functional.cross_entropy(output, torch.arange(4))

def outputs(output, batch):
    return {"logits": output}
"""
    )
    done = call("compile", "model.py", "spec.yaml", "--forward", "-o", "out")
    assert done.exit_code == 0, done.output
    shown = call("inspect", "out").stdout
    assert shown == call("inspect", "model.py", "spec.yaml", "--forward").stdout
    assert "logits  f32[4@dp, 8]" in shown
    assert "return (None, (" in shown
    assert "equal to one device: 1 values" in call("verify", "out").stdout
    assert "proven equal" in call("verify", "model.py", "spec.yaml", "--score", "--static").stdout
    for wrong, what in (
        (("inspect", "out", "--score"), "the options of a compiled DIR are fixed"),
        (("compile", "model.py", "spec.yaml", "--forward", "--score"), "a program returns either values or scores"),
        (("run", "out"), "the program is forward-only"),
    ):
        done = call(*wrong)
        assert done.exit_code == 2
        assert what in flat(done.stderr)


def test_overrides(files: Path) -> None:
    found = json.loads(
        call("compile", "model.py", "spec.yaml", "--mesh", "dp=4,tp=1", "--set", "data.bucket_mb=1", "--json").stdout
    )
    assert found["mesh"] == {"dp": 4, "tp": 1}


def test_a_transformers_model_from_its_config_alone(files: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    (files / "config.json").write_text(json.dumps(config))
    (files / "llama.yaml").write_text('shardc: 1\nmesh: {tp: 2}\nshard: {"*.{q,k,v}_proj": column, "*.o_proj": row}\n')
    for ref in ("hf:config.json", "hf:LlamaForCausalLM:config.json"):
        done = call("compile", ref, "llama.yaml", "--batch", "2", "--seq", "8", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["inputs"][0]["type"] == "i64[2, 8]"


def test_the_schema(files: Path) -> None:
    assert "properties" in json.loads(call("spec", "--schema").stdout)


@pytest.mark.parametrize(
    "command",
    [
        ["compile", "model.py", "spec.yaml", "--mesh", "dp=3"],
        ["inspect", "model.py", "spec.yaml", "--mesh", "dp=3"],
        ["verify", "gone"],
        ["run", "model.py", "spec.yaml", "--mesh", "dp=3"],
        ["plan", "gone.py", "--devices", "2"],
        ["rules", "aten.gone"],
        ["device", "gone"],
    ],
    ids=lambda c: c[0],
)
def test_errors_are_json_too(files: Path, command: list[str]) -> None:
    (files / "model.py").write_text(MODEL.replace("        return self", "        print('mine')\n        return self"))
    done = call(*command, "--json")
    assert done.exit_code == 2
    for error in (found := json.loads(done.stdout)["errors"]):
        assert set(error) == {"where", "what", "fix"}
        assert error["where"]
        assert error["what"]
    if "dp=3" in command:
        assert found == [
            {
                "where": "--mesh dp=3",
                "what": "input 'x': the batch of 4 (dim 0) is not divisible by dp=3",
                "fix": "make it 3 or 6, or dp=2 or 4, or set `uneven: pad`",
            }
        ]


def test_what_the_users_code_prints_is_no_part_of_the_document(files: Path) -> None:
    (files / "model.py").write_text(MODEL.replace("        return self", "        print('mine')\n        return self"))
    done = call("compile", "model.py", "spec.yaml", "--json")
    assert json.loads(done.stdout)["world"] == 4
    assert "mine" in done.stderr


def test_the_version() -> None:
    assert call("--version").stdout == f"shardc {shardc.__version__}\n"


def test_a_rank_that_raises_shows_the_users_line_and_ends_the_run(files: Path) -> None:
    (files / "model.py").write_text(
        MODEL + "\ndef data(split):\n    yield batch()\n    raise OSError('the disk is gone')\n"
    )
    done = warm.run("run", "model.py", "spec.yaml", "--mesh", "dp=2,tp=1", "--json", cwd=files, timeout=120)
    assert done.returncode == 1
    (error,) = json.loads(done.stdout)["errors"]
    assert error["what"] == "OSError: the disk is gone"
    assert re.fullmatch(r"model\.py:\d+", error["where"])
    assert "OSError: the disk is gone" in done.stderr
    assert re.search(r"rank \d \(dp=\d, tp=0\) failed", done.stderr)
    assert "Connection closed" not in done.stderr


# --- wrong models -----------------------------------------------------------------------------------------------------

HEAD = "import torch\nfrom torch import nn\n"
BATCH = "def batch():\n    return {'x': torch.ones(4, 8)}\n"


def net(forward: str, init: str = "self.a = nn.Linear(8, 8)") -> str:
    head = (
        f"{HEAD}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n    def"
        " forward(self, x):\n"
    )
    return f"{head}{forward}\ndef model():\n    return Net()\n{BATCH}"


WRONG_MODELS: list[tuple[str, str, str, str, str]] = [
    # name, file, where, what, fix
    ("syntax", "def model(:\n", "model.py:1", "not Python: invalid syntax (def model(:)", "correct that line"),
    ("import", "import torchh\n", "model.py:1", "ModuleNotFoundError: No module named 'torchh'", "pip install torchh"),
    (
        "raises on import",
        HEAD + "x = 1 / 0\n",
        "model.py:3",
        "ZeroDivisionError: division by zero (x = 1 / 0)",
        "--debug shows",
    ),
    ("no model", HEAD + BATCH, "model.py", "the file has no model()", "define model(): it returns the nn.Module"),
    ("misspelt model", HEAD + "def modle():\n    pass\n" + BATCH, "model.py", "no model()", "there is modle()"),
    ("no batch", HEAD + "def model():\n    return nn.Linear(2, 2)\n", "model.py", "no batch()", "define batch()"),
    (
        "data takes no split",
        HEAD + "def model():\n    pass\n" + BATCH + "def data():\n    pass\n",
        "model.py:7",
        "data() cannot be called as data(split): too many positional arguments",
        "write `def data(split)`",
    ),
    ("model is no function", HEAD + "model = 3\n" + BATCH, "model.py", "model is a int, not a function", "def model"),
    (
        "model raises",
        HEAD + "def model():\n    return nn.Linear(2, -2)\n" + BATCH,
        "model.py:4",
        "model() raises",
        "--debug shows the whole traceback",
    ),
    (
        "model returns no module",
        HEAD + "def model():\n    return 3\n" + BATCH,
        "model.py",
        "model() returns a int",
        "return an nn.Module",
    ),
    (
        "batch raises",
        HEAD + "def model():\n    pass\ndef batch():\n    return missing\n",
        "model.py:6",
        "batch() raises NameError",
        "--debug shows the whole traceback",
    ),
    (
        "batch returns text",
        HEAD + "def model():\n    pass\ndef batch():\n    return 'x'\n",
        "model.py",
        "batch() returns a str",
        "return a dict",
    ),
    (
        "batch without tensors",
        net("        return x").replace("torch.ones(4, 8)", "3"),
        "",
        "contains no tensor",
        "pass a dict",
    ),
    ("loss is no scalar", net("        return self.a(x)"), "model.py:7", "no scalar loss", "pass loss="),
    (
        "wrong keyword",
        net("        return self.a(x).sum()").replace("{'x'", "{'y'"),
        "model.py:7",
        "its keys are y",
        "rename the batch's key 'y' to 'x'",
    ),
    (
        "a key too many",
        net("        return self.a(x).sum()").replace("{'x'", "{'m': torch.ones(4), 'x'"),
        "model.py:7",
        "unexpected keyword argument 'm'",
        "leave 'm' out of the batch, or add loss(output, batch)",
    ),
    (
        "a key too few",
        net("        return self.a(x).sum()").replace("forward(self, x)", "forward(self, x, mask)"),
        "model.py:7",
        "missing a required argument: 'mask'",
        "add 'mask' to the batch",
    ),
    (
        "a tuple and a loss",
        net("        return self.a(x)").replace("{'x': torch.ones(4, 8)}", "torch.ones(4, 8), torch.ones(4, 8)")
        + "def loss(output, batch):\n    return (output - batch[1]).square().mean()\n",
        "model.py:7",
        "too many positional arguments",
        'make the batch a dict, {"x": ..., "y": ...}',
    ),
    ("a script", "raise SystemExit\n" + HEAD, "model.py:1", "raises SystemExit (raise SystemExit)", "__main__"),
    (
        "another builder",
        HEAD + "def build():\n    return nn.Linear(2, 2)\n" + BATCH,
        "model.py",
        "no model()",
        "or name the function that makes it, model.py:NAME, of build, batch",
    ),
    (
        "flex_attention",
        "from torch.nn.attention.flex_attention import flex_attention\n"
        + net(
            "        q = self.a(x).view(1, 1, 4, -1)\n"
            "        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - s.sum()).sum()"
        ),
        "model.py:10",
        "the score_mod of flex_attention calls sum, which does not work element by element",
        "read one element of the result for each score",
    ),
    ("shapes do not fit", net("        return self.a(x[:, :4]).sum()"), "model.py:8", "", ""),
    ("branch on values", net("        return self.a(x).sum() if x.sum() > 0 else x.sum()"), "model.py:8", "", ""),
    (
        "loop over values",
        net(
            "        y = self.a(x)\n        for i in range(int(x.sum())):\n            y = y + i\n        return"
            " y.sum()"
        ),
        "model.py:9",
        "",
        "",
    ),
    ("item", net("        return self.a(x).sum() * x.max().item()"), "model.py:8", "", ""),
    (
        "random op",
        net("        return (self.a(x) + torch.poisson(x)).sum()"),
        "model.py:8",
        "draws random numbers",
        "pass them in with the batch",
    ),
    (
        "custom autograd function",
        net("        return Twice.apply(self.a(x)).sum()").replace(
            "class Net",
            "class Twice(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return g / g.norm()\nclass Net",
        ),
        "model.py:15",
        "custom autograd function Twice has a backward that is not linear",
        "ordinary torch ops",
    ),
    (
        "tensor hook",
        net("        y = self.a(x)\n        y.register_hook(lambda g: 2 * g)\n        return y.sum()"),
        "model.py:9",
        "hook",
        "",
    ),
    ("numpy", net("        return self.a(x).sum() * x.numpy().max()"), "model.py:8", "", ""),
]


@pytest.mark.parametrize(("text", "where", "what", "fix"), [pytest.param(*row[1:], id=row[0]) for row in WRONG_MODELS])
def test_wrong_models(files: Path, text: str, where: str, what: str, fix: str) -> None:
    (files / "model.py").write_text(text)
    (files / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 2}\n")
    done = call("compile", "model.py", "spec.yaml")
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    said = flat(done.stderr)
    assert "Traceback" not in said
    assert "fix: " in said
    for part in (where, what, fix):
        assert part in said


# --- wrong command lines ----------------------------------------------------------------------------------------------

#: (what is wrong, the command line, what is said, its fix); MS: model.py spec.yaml
WRONG_LINES: list[tuple[str, str, str, str]] = [
    ("no such model", "compile modle.py spec.yaml", "there is no model file modle.py", "did you mean model.py"),
    ("no such spec", "compile model.py spek.yaml", "spek.yaml", ""),
    ("no spec", "compile model.py", "no spec given", "model.py spec.yaml"),
    ("no such builder", "compile model.py:big spec.yaml", "the file has no big()", "define big()"),
    ("unknown axis in --mesh", "compile MS --mesh tq=2", "tq", ""),
    ("no size in --mesh", "compile MS --mesh tp", "'tp' does not name an axis and its size", "dp=4,tp=1"),
    ("two sizes", "compile MS --mesh tp=2,tp=4", "tp has two sizes, 2 and 4", "keep one"),
    ("unknown --set", "compile MS --set data.zerro=1", "zerro", "zero"),
    ("a folder that is no artifact", "inspect .", "is not a shardc artifact", "shardc compile -o DIR"),
    ("a folder to compile", "compile .", "is a folder", "name a model file"),
    ("overrides of an artifact", "inspect . --mesh tp=1", "already contains its spec", "compile the model again"),
    ("no such pass", "inspect MS --diff plaice", "there is no pass plaice", "place"),
    ("no such stage", "inspect MS --stage 3", "there is no stage 3", "stages 0 to 0"),
    (
        "memory of an unknown device",
        "inspect MS --memory --device h100",
        "there is no device 'h100'",
        "did you mean 'h100-80g'?",
    ),
    ("processes", "run MS --nproc 3", "", ""),
    (
        "nothing to resume",
        "run MS --resume gone",
        "--resume gone: there is no checkpoint in this folder",
        "shardc saved to",
    ),
    ("batch of a model file", "compile MS --batch 3", "belong to hf: models", "batch()"),
    ("no such config", "compile hf:gone.json spec.yaml", "there is no file gone.json", "config.json"),
    *(
        (f"swapped, {verb}", f"{verb} spec.yaml model.py", "this is a spec, not a model file", "comes first")
        for verb in ("compile", "inspect", "verify", "run")
    ),
    ("a spec to plan", "plan spec.yaml", "this is a spec, not a model file", "comes first"),
    ("Python as a spec", "compile model.py model.py", "a spec is YAML, not Python", "path of a YAML file"),
    ("JSON as a model", "compile vit.json spec.yaml", "a model file ends in .py", "hf:config.json"),
    ("a config as a model", "compile tiny/config.json spec.yaml", "a config of transformers", "hf:tiny/config.json"),
    ("its folder as a model", "compile tiny spec.yaml", "this is a folder of transformers", "write hf:tiny"),
    ("a misspelt folder", "compile hf:tinny spec.yaml", "there is no file tinny", "did you mean hf:tiny?"),
    ("a name of the hub", "compile hf:Org/A-1.5B spec.yaml", "in this machine's cache", "hf download Org/A"),
    (
        "a folder as a config",
        "compile hf:. spec.yaml",
        "there is no config.json in the folder .",
        "or a folder that has one",
    ),
    ("no language model", "compile hf:vit.json spec.yaml", "'vit' is not a causal lang", "write a model.py"),
    ("a list as a config", "compile hf:list.json spec.yaml", "the config has no model_type", "model_type"),
    ("sizes of an artifact", "verify . --batch 3", "its spec and the sizes of its", "--batch and --seq"),
    ("config is no JSON", "compile hf:spec.yaml spec.yaml", "not JSON", "config.json"),
]


@pytest.mark.parametrize(("args", "what", "fix"), [pytest.param(*row[1:], id=row[0]) for row in WRONG_LINES])
def test_wrong_command_lines(files: Path, args: str, what: str, fix: str) -> None:
    (files / "vit.json").write_text('{"model_type": "vit", "hidden_size": 32, "num_attention_heads": 2}')
    (files / "list.json").write_text("[1]")
    (files / "tiny").mkdir()
    (files / "tiny" / "config.json").write_text("{}")
    done = call(*args.replace("MS", "model.py spec.yaml").split())
    assert done.exit_code == 2, done.output
    said = flat(done.stderr)
    assert "Traceback" not in said
    assert "fix: " in said
    assert what in said
    assert fix in said


def test_several_mistakes_are_told_together(files: Path) -> None:
    (files / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 3, tp: 2}\nshard:\n  upp: column\n  down: row\n")
    done = call("compile", "model.py", "spec.yaml")
    assert done.exit_code == 2
    assert done.stderr.count("error") == 2
    assert "spec.yaml:4:3" in done.stderr


def test_debug_shows_the_traceback(files: Path) -> None:
    assert "Traceback" in call("compile", "gone.py", "spec.yaml", "--debug").stderr


def test_an_error_of_all_ranks_is_told_once(files: Path) -> None:
    """Two ranks that fail before they have met: the first to fail speaks for both; torchrun's summary has it, too."""
    (files / "spec.yaml").write_text(SPEC.replace("column", "colwise"))
    world = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "shardc", "run", "model.py", "spec.yaml"],
            env={**world, "RANK": str(r), "LOCAL_RANK": str(r), "TORCHELASTIC_ERROR_FILE": str(files / f"error{r}")},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    silent, said = sorted((p.communicate()[1] for p in ranks), key=len)
    assert [p.returncode for p in ranks] == [2, 2]
    assert "unknown style 'colwise'" in said
    assert not silent.strip()
    failures = {r: ProcessFailure(r, 0, 2, str(files / f"error{r}")) for r in range(2)}
    assert str(ChildFailedError("shardc", failures)).count("unknown style 'colwise'") == 2


def test_a_rank_whose_store_is_gone_tells_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that held it was killed."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    del server
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(presence, "joined", lambda: (client, 1, 2))
    common.once("model.py:3: no", lambda: print("model.py:3: no"))
    assert capsys.readouterr().out == "model.py:3: no\n"


OWN_OP = """
import torch
import shardc
@torch.library.custom_op("ofthecli::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: 2 * g)
shardc.rule(torch.ops.ofthecli.twice.default, "... -> ...", linear="0")
"""


def test_a_compiled_folder_with_an_op_of_the_users_own(files: Path) -> None:
    """Nothing is imported unasked: only where the op is missing, and then it is said whose Python."""
    (files / "model.py").write_text(OWN_OP + MODEL.replace("torch.relu(", "torch.ops.ofthecli.twice("))
    assert call("compile", "model.py", "spec.yaml", "-o", "out").exit_code == 0

    def elsewhere(*args: str) -> subprocess.CompletedProcess[str]:
        return warm.run(*args, cwd=files)

    done = elsewhere("verify", "out")
    assert done.returncode == 0, done.stderr
    assert f"importing {files / 'model.py'}: out calls an op that it registers" in flat(done.stderr)
    assert "equal to one device" in done.stdout
    (files / "model.py").rename(files / "moved.py")
    done = elsewhere("inspect", "out", "--comm")
    assert done.returncode == 2
    assert "nothing has registered the op torch.ops.ofthecli.twice" in done.stderr
    assert "model.py, does not exist" in done.stderr
    assert "--model model.py" in done.stderr
    done = elsewhere("inspect", "out", "--comm", "--model", "moved.py")
    assert done.returncode == 0, done.stderr
    assert "gradients, in buckets" in done.stdout


def test_memory_that_runs_out_is_told_with_what_a_step_needs(files: Path) -> None:
    assert call("compile", "model.py", "spec.yaml", "-o", "out").exit_code == 0
    said = worker._expected(Job(program="out", model="model.py"))
    assert re.fullmatch(
        r"a step needs by calculation [\d.]+ KiB on a rank at its peak, at backward of down \(model\.py:\d+\)", said
    )


@pytest.mark.parametrize(
    ("command", "option", "said"),
    [
        ("plan model.py --devices 2 --html none/x.html", "--html", "there is no folder none"),
        ("plan model.py --devices 2 -o none/x.yaml", "--output", "there is no folder none"),
        ("plan model.py --devices 2 -o .", "--output", ". is a folder"),
        ("inspect model.py spec.yaml --html none/x.html", "--html", "there is no folder none"),
        ("compile model.py spec.yaml -o spec.yaml/out", "--output", "spec.yaml is a file, not a folder"),
        ("compile model.py spec.yaml --dump model.py", "--dump", "model.py is a file, not a folder"),
        ("compile model.py spec.yaml -o /proc/x", "--output", "cannot write /proc/x"),
        ("run model.py spec.yaml --log /proc/x", "--log", "cannot write /proc/x"),
        ("export model.py none /proc/x", "OUT", "cannot write /proc/x"),
        ("run model.py spec.yaml --clip 0", "--clip", "must be a number above 0, not 0"),
        ("run model.py spec.yaml --clip -1", "--clip", "must be a number above 0, not -1"),
    ],
)
def test_where_a_command_writes_is_tried_before_its_work(
    command: str, option: str, said: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.cli.model_file.load", lambda *_, **__: pytest.fail("the work began"))
    result = call(*command.split())
    assert result.exit_code == 2
    assert f"error {option}: " in flat(result.stderr)
    assert said in flat(result.stderr)
    assert "fix: " in result.stderr


HINTS = [
    ("an instance", "model.py", "def model():\n    return Net()", "model = Net()", "def model(): return Net(...)"),
    (
        "values of weights",
        "model.py",
        "return Net()",
        "m = Net(); print(m.up.weight.sum().item()); return m",
        "remove code that reads values",
    ),
    ("a device", "model.py", "return Net()", "return Net().cuda()", "leave out .cuda()"),
    (
        "a wrapper",
        "model.py",
        "return Net()",
        "return nn.parallel.DistributedDataParallel(Net())",
        "remove the wrapper",
    ),
    (
        "a key that is not there",
        "model.py",
        "return self.down(torch.relu(self.up(x))).square().mean()",
        "return self.up(x)\n\ndef loss(output, batch): return (output - batch['labels']).mean()",
        "the loss reads 'labels', but the batch has 'x'",
    ),
    (
        "a metric as a number",
        "model.py",
        "return self.down(torch.relu(self.up(x))).square().mean()",
        "return self.up(x)\n\ndef loss(output, batch): return output.mean(), {'m': output.mean().item()}",
        "the output 'm' is a Python number",
    ),
    (
        "ids that are numbers with a point",
        "model.py",
        "self.down(torch.relu(self.up(x)))",
        "nn.functional.embedding(x, self.up.weight)",
        "in batch(), idx.long()",
    ),
    ("a layer's name", "spec.yaml", "  up: column", '  "layer.*.up": column', "did you mean 'layers.*.up'?"),
    ("a brace", "spec.yaml", "{dp: 2, tp: 2}", "{dp: 2, tp: 2", "close what line 2 opens, with '}', before line 3"),
    (
        "two dims",
        "spec.yaml",
        "  up: column",
        "  up.weight: {0: tp, 1: tp}",
        "an axis splits one dim, once: {0: tp} or",
    ),
    ("no experts", "spec.yaml", "  down: row\n", "  down: row\nexperts: [{match: up, axis: tp}]\n", "delete the entry"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), [pytest.param(*row[1:], id=row[0]) for row in HINTS])
def test_what_beginners_write_gets_the_line_to_write(files: Path, file: str, old: str, new: str, said: str) -> None:
    if "layer." in new:
        model = MODEL.replace(
            "self.up, self.down", "self.layers = nn.ModuleList([nn.Module()])\n        self.layers[0].up, self.down"
        )
        (files / "model.py").write_text(model.replace("self.up(x)", "self.layers[0].up(x)"))
    text = (files / file).read_text()
    assert old in text
    (files / file).write_text(text.replace(old, new))
    result = call("compile", "model.py", "spec.yaml")
    assert result.exit_code == 2
    assert said in flat(result.stderr)


def test_outputs_are_tried_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there is to be replaced: what counts is whether it can be written, not its folder."""
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("as it was")
    reading, writing = os.pipe()
    common.check_outputs(
        {"--html": there, "--trace": new, "--json": None}, {"--save": tmp_path / "a" / "b", "--log": None}
    )
    common.check_outputs({"--html": Path(f"/dev/fd/{writing}")})  # as of `>(...)`: no folder for other files
    assert [x.name for x in tmp_path.iterdir()] == ["there.json"]
    assert there.read_text() == "as it was"
    os.close(reading)
    os.close(writing)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != there)  # root may write everywhere
        with pytest.raises(ShardcError, match=f"--html: cannot write {there}"):
            common.check_outputs({"--html": there})
    for files, where, said in (
        ({"--trace": tmp_path}, {}, "is a folder\n  fix: name a file in it"),
        ({"--trace": tmp_path / "no" / "x.json"}, {}, "there is no folder .*no\n  fix: mkdir -p"),
        ({}, {"--save": there / "deep"}, r"there\.json is a file, not a folder"),
        ({"--trace": Path("/proc/x.json")}, {}, "cannot write /proc/x.json: .*, in /proc"),
    ):
        with pytest.raises(ShardcError, match=said):
            common.check_outputs(files, where)


def test_a_compiled_folder_is_run_with_the_python_that_it_says_or_another(files: Path) -> None:
    """Before it is imported, it is said whose it is, and what the folder's spec writes; `--model` replaces it."""
    spec = SPEC.replace("dp: 2, tp: 2", "dp: 1, tp: 1")
    (files / "spec.yaml").write_text(f"{spec}\nrun: {{save: {files / 'saved'}}}\n")
    assert call("compile", "model.py", "spec.yaml", "-o", "out").exit_code == 0
    (files / "other.py").write_text(f"{(files / 'model.py').read_text()}\nprint('the other one')\n")
    run = ("run", "out", "--steps", "1")
    done = warm.run(*run, cwd=files)
    assert done.returncode == 0, done.stderr
    assert f"importing {files / 'model.py'}, which out names; --model FILE imports another" in flat(done.stderr)
    assert f"save: {files / 'saved'}, as the spec in out says" in flat(done.stderr)
    done = warm.run(*run, "--model", "other.py", "--save", "mine", cwd=files)
    assert done.returncode == 0, done.stderr
    assert "importing" not in done.stderr
    assert "as the spec" not in done.stderr
    assert "the other one" in done.stdout + done.stderr


@pytest.mark.parametrize("ref", ["model.py", "../model.py", "out/model.py", ""])
def test_a_compiled_folder_cannot_name_what_lies_where_the_command_runs(ref: str, files: Path) -> None:
    assert call("compile", "model.py", "spec.yaml", "-o", "out").exit_code == 0
    manifest = files / "out" / "manifest.json"
    table = json.loads(manifest.read_text())
    table["meta"]["model_ref"] = ref
    manifest.write_text(json.dumps(table))
    done = call("run", "out", "--steps", "1")
    assert done.exit_code == 2
    assert "has no name of the model file it was compiled from" in flat(done.output)
