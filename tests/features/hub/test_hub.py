"""Model cards beside weights, and uploads to a hub: a server on this machine that speaks its HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardc.cli import app
from shardc.errors import ShardcError
from shardc.features.hub import card, upload
from shardc.runtime.storage.urls import Url
from tests.cli.test_cli import MODEL

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

SPEC = "shardc: 1\nmesh: {dp: 1}\n"


class Hub(ThreadingHTTPServer):
    """What was asked of it: bodies of requests, by path, and the files of commits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[tuple[str, str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = ""


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lines = [json.loads(x) for x in body.splitlines() if x]
        token = self.headers.get("authorization", "")
        self.server.asked.append((self.path, token, lines))
        if self.server.refuses and self.server.refuses in self.path:
            return self.answer({"error": "You don't have the rights"}, 403)
        if "preupload" in self.path:  # all in the commit itself, whatever the size
            files = [{"path": x["path"], "uploadMode": "regular", "shouldIgnore": False} for x in lines[0]["files"]]
            return self.answer({"files": files})
        if "commit" in self.path:
            for line in (x["value"] for x in lines if x["key"] == "file"):
                self.server.files[line["path"]] = base64.b64decode(line["content"])
        address = f"http://127.0.0.1:{self.server.server_port}/org/name"
        return self.answer({"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1", "errors": []})

    def do_GET(self) -> None:
        missing = self.server.refuses == "create"
        self.answer({"id": "org/name", "sha": "1", "siblings": []}, 404 if missing else 200)

    def answer(self, document: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shardc(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments])


def head(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text().split("---\n")[1]))


def test_a_run_writes_a_card_and_uploads_the_model_alone(run: Path, hub: Hub) -> None:
    done = shardc("run", "model.py", "spec.yaml", "--steps", "2", "--save", "out", "--push-to-hub", "org/name")
    assert done.exit_code == 0, done.output
    (created,) = (lines[0] for path, _, lines in hub.asked if path == "/api/repos/create")
    assert (created["organization"], created["name"]) == ("org", "name")
    assert created.get("private") or created["visibility"] == "private"  # the second: huggingface_hub 2
    assert {token for _, token, _ in hub.asked} == {"Bearer hf_of_the_test"}
    assert hub.files.keys() == {"README.md", "model.safetensors"}  # no checkpoint
    assert hub.files["model.safetensors"] == (run / "out" / "model.safetensors").read_bytes()
    text = hub.files["README.md"].decode()
    assert text == (run / "out" / "README.md").read_text()
    assert "| steps | 2 |" in text
    assert "| loss | " in text
    assert "mesh: {dp: 1}" in text
    assert head(run / "out" / "README.md") == {"tags": ["shardc"]}


def test_an_export_takes_the_card_of_the_run_and_leaves_a_users_own(run: Path, hub: Hub) -> None:
    assert shardc("run", "model.py", "spec.yaml", "--steps", "1", "--save", "out").exit_code == 0
    assert shardc("export", "model.py", "out", "a", "--push-to-hub", "org/name").exit_code == 0
    assert (run / "a" / "README.md").read_text() == (run / "out" / "README.md").read_text()
    assert hub.files["README.md"] == (run / "a" / "README.md").read_bytes()
    (run / "a" / "README.md").write_text("# mine\n")
    assert shardc("export", "model.py", "out", "a").exit_code == 0
    assert (run / "a" / "README.md").read_text() == "# mine\n"
    (run / "out" / "README.md").unlink()
    assert shardc("export", "model.py", "out", "b").exit_code == 0
    assert "| checkpoint | out |" in (run / "b" / "README.md").read_text()


def test_what_is_wrong_is_known_before_the_run(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("run", "model.py", "spec.yaml", "--steps", "1", "--save", "out")
    assert "'name' does not name a repository" in shardc(*command, "--push-to-hub", "name").output
    hub.refuses = "create"
    refused = shardc(*command, "--push-to-hub", "org/name")
    assert "the hub does not open org/name: " in refused.output
    assert refused.exit_code == 2
    asked = len(hub.asked)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "there is no token of the hub" in shardc(*command, "--push-to-hub", "org/name").output
    assert "there is no folder to upload" in shardc(*command[:-2], "--push-to-hub", "org/name").output
    assert len(hub.asked) == asked
    assert not (run / "out" / "checkpoint").exists()


def test_an_upload_that_fails_says_where_the_weights_are(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    hub.refuses = "commit"
    with pytest.raises(ShardcError, match="was not uploaded to org/name: ") as e:
        upload.upload(tmp_path, "org/name")
    assert f"hf upload org/name {tmp_path} ." in e.value.fix


def test_files_of_a_model(tmp_path: Path) -> None:
    mine = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    mine += [
        "README.md",
        "LICENSE",
        "chat_template.jinja",
        "style/adapter_config.json",
        "style/adapter_model.safetensors",
    ]
    others = ["steps.jsonl", "summary.json", "notes.txt", "data.safetensors", "checkpoint/step-1/model.safetensors"]
    for name in mine + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert upload.files_of(tmp_path) == sorted(mine)


def test_a_card_takes_over_the_license_and_the_name_of_the_base(tmp_path: Path) -> None:
    base = tmp_path / "models--org--base" / "snapshots" / "0123"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\ntags: [x]\n---\n# base\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert card.write(out, base, {"loss": 1.23456, "held-out loss": None, "data": "a | b"}, "x: '```'\n")
    text = (out / "README.md").read_text()
    assert head(out / "README.md") == {
        "base_model": "org/base", "language": ["en"], "library_name": "transformers", "license": "apache-2.0",
        "tags": ["shardc"],
    }  # fmt: skip
    assert "| loss | 1.235 |\n" in text
    assert "| data | a \\| b |\n" in text
    assert "held-out" not in text
    assert "````yaml\nx: '```'\n````" in text
    assert card.write(out, None, {})  # its own, again
    (base / "README.md").write_text("---\n: [\n---\n")
    assert card.write(out, base, {})
    assert "license" not in head(out / "README.md")


def test_a_folder_in_a_store_is_not_uploaded() -> None:
    with pytest.raises(ShardcError, match="there is no folder to upload"):
        upload.prepare("org/name", Url("s3://bucket/run"))
