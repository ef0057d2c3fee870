"""Read and check the config.json of a transformers model that `hf:` names, without transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardc import text_file
from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest

#: Limits for a transformers config.json: bytes (the longest has about 20 thousand), numbers, and numbers of layers.
MAX_CONFIG, MAX_NUMBER, MAX_LAYERS = 1 << 20, 1e15, 100_000


def read(path: Path, file: str, ref: str) -> Any:
    """Read a config.json that is not trusted. Raises ShardcError if it is not one.

    Sizes that take hours to build, and code that transformers would download, are also refused.
    """
    fix = "name a transformers config.json"
    text = text_file.read(path, "config", where=ref, fix=fix, limit=MAX_CONFIG)
    try:
        values = json.loads(text, object_pairs_hook=text_file.unique)
    except json.JSONDecodeError as e:
        raise ShardcError(f"not JSON: {e.msg}", where=f"{file}:{e.lineno}:{e.colno}", fix=fix) from None
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, a duplicate key, deep nesting
        fault = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise ShardcError(f"the config cannot be read: {fault}", where=file, fix=fix) from None
    boxes: list[tuple[str, Any]] = [("", values)]
    while boxes:
        key, value = boxes.pop()
        if isinstance(value, dict):
            boxes += value.items()
        elif isinstance(value, list):
            boxes += ((key, x) for x in value)
        elif isinstance(value, (int, float)) and abs(value) > (MAX_NUMBER if "layers" not in key else MAX_LAYERS):
            raise ShardcError(f"{key}: {value:.3g} is too large for a model", where=file, fix="correct it")
        elif "attn_implementation" in key and isinstance(value, str) and "/" in value:
            fault = f"{key}: {value[:60]!r} would fetch code from the hub and run it"
            raise ShardcError(fault, where=file, fix="leave it out, or name one of transformers: sdpa, eager")
    return values


def path_of(name: str, ref: str) -> Path:
    """Find the config.json of `hf:`: a file, a folder, or a model in the local hub cache. No download."""
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        fix = "name a transformers config.json, or a folder that has one"
        if (path / "adapter_config.json").is_file():
            fix = f"these are adapters: name hf: and their base, --weights {name}, and `adapters` in the spec"
        raise ShardcError(f"there is no config.json in the folder {name}", where=ref, fix=fix)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or path.suffix in (".json", ".yaml", ".py"):
        raise ShardcError(f"there is no file {name}", where=ref, fix="name a transformers config.json")
    from huggingface_hub import try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        return Path(cached)
    fault = f"there is no file {name}, and no model of that name in this machine's cache of the hub"
    fix = f"download its config once, `hf download {name} config.json --local-dir DIR`, and name hf:DIR/config.json"
    folders = [str(p.parent) for p in Path(name).parent.glob("*/config.json")]
    if near := nearest(name, folders):
        fix = f"did you mean hf:{near}? Or {fix}"
    raise ShardcError(fault, where=ref, fix=fix)
