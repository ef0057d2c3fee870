"""Upload a folder of weights to the Hugging Face hub, as transformers' `push_to_hub` does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError
from shardc.optional import library
from shardc.runtime.state.export import CARRIED, WEIGHTS
from shardc.runtime.storage.urls import Url

_OPTION = "--push-to-hub"
_OTHERS = re.compile(r"(adapter_)?config\.json|README\.md|LICEN[CS]E.*|NOTICE.*")


def prepare(repo: str, folder: Path | None) -> None:
    """Make the repository, private, unless it exists: what is wrong is known before a run begins.

    Raises ShardcError without a folder, the library or a token, for a name that is none, and if the hub refuses.
    """
    if folder is None or isinstance(folder, Url) or folder.suffix == ".safetensors":
        raise ShardcError(
            "there is no folder to upload",
            where=_OPTION,
            fix="name one of this machine: --save DIR, or OUT of an export",
        )
    hub: Any = library("huggingface_hub", _OPTION)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ShardcError(f"{repo!r} does not name a repository", where=_OPTION, fix="write ORG/NAME, or USER/NAME")
    if not hub.get_token():
        raise ShardcError("there is no token of the hub", where=_OPTION, fix="run `hf auth login`, or set HF_TOKEN")
    fix = "look at `hf auth whoami`: its token must be able to write there"
    _tried(f"the hub does not open {repo}", fix, hub.HfApi().create_repo, repo_id=repo, private=True, exist_ok=True)


def upload(folder: Path, repo: str) -> str:
    """Upload the files of a model, and no checkpoint or log; return the address of the repository."""
    hub: Any = library("huggingface_hub", _OPTION)
    fix = f"the weights are in {folder}: try again with `hf upload {repo} {folder} . --exclude 'checkpoint/*'`"
    options = {"folder_path": folder, "allow_patterns": files_of(folder), "commit_message": "Trained with shardc"}
    done = _tried(f"{folder} was not uploaded to {repo}", fix, hub.HfApi().upload_folder, repo_id=repo, **options)
    return str(done.repo_url)


def files_of(folder: Path) -> list[str]:
    """Return the files of a folder that belong to its model, relative to it: with those of further adapters."""
    kinds = (WEIGHTS, CARRIED, _OTHERS)
    own = [f for f in folder.iterdir() if f.is_file() and any(k.fullmatch(f.name) for k in kinds)]
    own += [f for f in folder.glob("additional_chat_templates/*") if f.is_file()]
    own += [f for at in folder.glob("*/adapter_config.json") for f in at.parent.iterdir() if f.is_file()]
    return sorted(str(f.relative_to(folder)) for f in own)


def _tried(fault: str, fix: str, call: Any, **options: Any) -> Any:
    try:
        return call(**options)
    except Exception as e:  # of the library, or of the HTTP client below it
        why = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise ShardcError(f"{fault}: {why}", where=_OPTION, fix=fix) from e
