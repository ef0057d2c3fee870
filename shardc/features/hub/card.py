"""Write the model card of a folder of weights: README.md with the hub's metadata, unless the user wrote one."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from shardc.version import VERSION

#: In every card that is written here, and may be written anew.
MARK = "<!-- written by shardc; remove this line, and it is yours: shardc does not replace it then -->"
#: What a card takes over from the card of the model that training began from.
_INHERITED = ("license", "license_name", "license_link", "language")
_OF_HUB = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def write(folder: Path, base: Path | None, facts: Mapping[str, Any], spec: str = "") -> bool:
    """Write the card of a folder. Returns whether it did: a README.md of the user's stays.

    base: the folder that training began from. facts: the table's rows; those without a value are left out. spec: YAML.
    """
    file = folder / "README.md"
    if file.exists() and MARK not in file.read_text(errors="replace"):
        return False
    head = _inherited(base)
    if (name := _name_of(base)) and "/" in name:
        head["base_model"] = name
    if (folder / "adapter_config.json").exists():
        head["library_name"] = "peft"
    elif (folder / "config.json").exists():
        head["library_name"] = "transformers"
    rows = {"base": name, **facts, "made with": _versions()}
    lines = [
        f"---\n{yaml.safe_dump(head | {'tags': ['shardc']}, sort_keys=True)}---\n{MARK}",
        f"# {folder.resolve().name}",
        "\n".join(["| | |", "|---|---|", *(f"| {k} | {_cell(x)} |" for k, x in rows.items() if x not in (None, ""))]),
    ]
    if spec:
        fence = "`" * max(3, *(len(x) + 1 for x in re.findall("`+", spec)), 3)
        lines.append(f"Trained on several devices as on one, by this spec:\n\n{fence}yaml\n{spec.strip()}\n{fence}")
    file.write_text("\n\n".join(lines) + "\n")
    return True


def of_export(folder: Path, base: Path | None, checkpoint: Path) -> None:
    """Write the card of an exported checkpoint: that of the run, if it is beside the checkpoint, or a short one."""
    cards = (at / "README.md" for at in (checkpoint, *checkpoint.resolve().parents[:2]))
    text = next((x for f in cards if f.is_file() and MARK in (x := f.read_text(errors="replace"))), None)
    if write(folder, base, {"checkpoint": checkpoint.resolve().name}) and text is not None:
        (folder / "README.md").write_text(text)


def _inherited(base: Path | None) -> dict[str, Any]:
    """Return what the metadata of the base's card says about its license and languages."""
    card = base / "README.md" if base is not None else None
    if card is None or not card.is_file():
        return {}
    parts = card.read_text(errors="replace").split("---\n", 2)
    try:
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return {}
    return {k: head[k] for k in _INHERITED if k in head} if isinstance(head, dict) else {}


def _name_of(base: Path | None) -> str:
    """Return the base's name on the hub if it is from the hub's cache, else the name of its folder, or ""."""
    if base is None:
        return ""
    of_hub = next((m for part in base.resolve().parts if (m := _OF_HUB.fullmatch(part))), None)
    return f"{of_hub[1]}/{of_hub[2]}" if of_hub else base.resolve().name


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _versions() -> str:
    names = ("torch", "transformers", "safetensors")
    found = {n: x.version for n in names for x in metadata.distributions(name=n)}
    libraries = [f"{n} {found[n]}" for n in names if n in found]
    return ", ".join([f"shardc {VERSION}", *libraries, f"Python {platform.python_version()}"])
