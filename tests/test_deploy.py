"""The files in deploy/: each says whether it was tried, fits the schema of its system, and calls shardc as it is."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from shardc.cli import app

DEPLOY = Path(__file__).parents[1] / "deploy"
FILES = sorted(p for p in DEPLOY.iterdir() if p.name != "README.md")


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def parsed(name: str) -> Any:
    return yaml.safe_load(text(name))


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """Schema of an object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, COUNT, TEXTS = (
    {"type": "string"},
    {"type": "integer", "minimum": 1},
    {"type": "array", "items": {"type": "string"}},
)
ANY: dict[str, Any] = {}
NAMES = {"type": "object", "additionalProperties": TEXT}
ENV = {"type": "array", "items": closed("name", name=TEXT, value=TEXT, valueFrom=ANY)}
#: Of github.com/kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml (and _trainingruntimes.yaml)
#: at 8c0f5059, and of the pods inside: the keys, their types, and which are required.
TRAINJOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=closed("", name=TEXT, generateName=TEXT, namespace=TEXT, labels=NAMES),
    spec=closed(
        "runtimeRef",
        activeDeadlineSeconds=COUNT,
        initializer=ANY,
        managedBy=TEXT,
        runtimePatches=ANY,
        suspend={"type": "boolean"},
        runtimeRef=closed("name", apiGroup=TEXT, kind=TEXT, name=TEXT),
        trainer=closed(
            "",
            args=TEXTS,
            command=TEXTS,
            env=ENV,
            image=TEXT,
            numNodes=COUNT,
            numProcPerNode=COUNT,
            resourcesPerNode=closed("", claims=ANY, limits=NAMES, requests=NAMES),
        ),
    ),
)
CONTAINER = closed(
    "name image", name=TEXT, image=TEXT, command=TEXTS, args=TEXTS, env=ENV, resources=ANY,
    volumeMounts={"type": "array", "items": closed("name mountPath", name=TEXT, mountPath=TEXT, subPath=TEXT)},
)  # fmt: skip
POD = closed(
    "containers", containers={"type": "array", "items": CONTAINER}, nodeSelector=NAMES, tolerations=ANY,
    terminationGracePeriodSeconds=COUNT,
    volumes={"type": "array", "items": closed("name", name=TEXT, persistentVolumeClaim=ANY,
             emptyDir=closed("", medium={"enum": ["", "Memory"]}, sizeLimit=TEXT))},
)  # fmt: skip
JOB = closed("template", metadata=ANY, spec=closed("template", template=closed("spec", metadata=ANY, spec=POD)))
RUNTIME = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainingRuntime"},
    metadata=closed("name", name=TEXT, labels=NAMES),
    spec=closed(
        "template",
        podGroupPolicy=ANY,
        mlPolicy=closed("", numNodes=COUNT, torch=ANY),
        template=closed(
            "spec",
            metadata=ANY,
            spec=closed(
                "replicatedJobs",
                replicatedJobs={
                    "type": "array",
                    "items": closed(
                        "name template",
                        name=TEXT,
                        replicas=COUNT,
                        template=closed("spec", metadata=closed("", labels=NAMES), spec=JOB["properties"]["spec"]),
                    ),
                },
            ),
        ),
    ),
)
#: Of github.com/skypilot-org/skypilot, sky/utils/schemas.py, get_task_schema and get_resources_schema: the keys.
SKYPILOT = closed(
    "", name=TEXT, workdir=TEXT, event_callback=TEXT, num_nodes=COUNT, setup=TEXT, run=TEXT, service=ANY, pool=ANY,
    resources=closed("", accelerators=TEXT, cpus=ANY, memory=ANY, use_spot={"type": "boolean"}, disk_size=ANY,
                     image_id=ANY, ports=ANY, infra=TEXT, cloud=TEXT, region=TEXT, network_tier=TEXT, any_of=ANY),
    envs=NAMES, secrets=NAMES, file_mounts=ANY, inputs=ANY, outputs=ANY, volumes=ANY, config=ANY,
)  # fmt: skip
SCHEMAS = {"kubeflow-trainjob.yaml": TRAINJOB, "kubeflow-runtime.yaml": RUNTIME, "skypilot.yaml": SKYPILOT}


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.name))
def test_each_file_says_whether_it_was_tried(file: Path) -> None:
    first = file.read_text().splitlines()[:5]
    assert any(line.lstrip("# ").startswith("Tried: ") for line in first)
    assert file.name in (DEPLOY.parent / "docs/how-to/clusters.md").read_text()


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_fits_the_schema_of_its_system(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(parsed(name))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_misspelt_key_does_not(name: str) -> None:
    document = parsed(name)
    inside = document.get("spec", document)
    inside["numNode"] = 2
    with pytest.raises(jsonschema.ValidationError, match="numNode"):
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(document)


def test_the_job_names_the_runtime_and_its_label() -> None:
    job, runtime = parsed("kubeflow-trainjob.yaml"), parsed("kubeflow-runtime.yaml")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (part,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert part["name"] == "node"
    assert part["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = part["template"]["spec"]["template"]["spec"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}


def scripts() -> dict[str, str]:
    sky = parsed("skypilot.yaml")
    return {"sbatch": text("train.sbatch"), "sky setup": sky["setup"], "sky run": sky["run"]}


@pytest.mark.parametrize("name", ["sbatch", "sky setup", "sky run"])
def test_scripts_are_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=scripts()[name], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_sbatch_come_before_commands() -> None:
    lines = text("train.sbatch").splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[0] == "#!/bin/bash"
    assert options
    assert max(options) < first  # Slurm reads none behind the first command
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[i]) for i in options)


def commands() -> dict[str, list[str]]:
    """What each file runs."""
    found = {}
    for name in ("sbatch", "sky run"):
        lines = scripts()[name].replace("\\\n", " ").splitlines()
        (line,) = [x for x in lines if "shardc run" in x and not x.startswith("#")]
        found[name] = shlex.split(re.sub(r"\$\w+", "1", re.sub(r"\$\(.*?\)", "host", line)))
    trainer = parsed("kubeflow-trainjob.yaml")["spec"]["trainer"]
    return {**found, "kubeflow": trainer["command"] + trainer["args"]}


@pytest.mark.parametrize("name", ["sbatch", "sky run", "kubeflow"])
def test_options_are_those_of_shardc_run(name: str) -> None:
    called = commands()[name]
    used = [x.partition("=")[0] for x in called[called.index("run") :] if x.startswith("--")]
    command: Any = typer.main.get_command(app)
    known = {option for parameter in command.commands["run"].params for option in parameter.opts}
    assert {"--check-links", "--auto-resume", "--save"} <= {*used} <= known
    if "torchrun" in called:
        from torch.distributed.run import get_args_parser

        arguments = called[called.index("torchrun") + 1 : called.index("shardc") + 1]
        assert get_args_parser().parse_args([*arguments, "run", "--log", "x"]).training_script == "shardc"


def test_what_the_dockerfile_copies_exists() -> None:
    lines = text("Dockerfile").replace("\\\n", " ").splitlines()
    instructions = [line for line in lines if line and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    assert {line.split()[0] for line in instructions} == known
    (first,) = [i for i, line in enumerate(instructions) if line.startswith("FROM")]
    assert all(line.startswith("ARG") for line in instructions[:first])
    copied = [name for line in instructions if line.startswith("COPY") for name in line.split()[1:-1]]
    assert all((DEPLOY.parent / name).exists() for name in copied)
    # what the package is made of, and the folders that links in shardc/ name
    assert {"shardc", "pyproject.toml", *(p.name for p in (DEPLOY.parent / "shardc").iterdir() if p.is_symlink())} <= {
        *copied
    }
    used = {name for line in instructions for name in re.findall(r"\$\{(\w+)\}", line)}
    assert used == {line.split()[1].partition("=")[0] for line in instructions if line.startswith("ARG")}


def test_the_file_for_ray_is_python() -> None:
    tree = ast.parse(text("ray_train.py"))
    assert {x.name for x in tree.body if isinstance(x, ast.FunctionDef)} >= {"train", "main"}
