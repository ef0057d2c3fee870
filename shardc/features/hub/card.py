"""Write the model card of a folder of weights: README.md with the hub's metadata, unless the user wrote one."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardc.version import VERSION

#: In every card that is written here, and may be written anew.
MARK = "<!-- written by shardc; remove this line, and it is yours: shardc does not replace it then -->"
#: What a card takes over from the card of the model that training began from.
_INHERITED = ("license", "license_name", "license_link", "language")


def write(folder: Path, base: Path | None, facts: Mapping[str, Any], spec: str = "") -> bool:
    """Write the card of a folder. Returns whether it did: a README.md of the user's stays.

    base: the folder that training began from. facts: the table's rows; those without a value are left out. spec: YAML.
    """
    file = folder / "README.md"
    if file.exists() and MARK not in file.read_text(errors="replace"):
        return False
    name, head = _of_base(base.resolve()) if base is not None else ("", {})
    kinds = {"config.json": "transformers", "adapter_config.json": "peft"}
    library = [kind for has, kind in kinds.items() if (folder / has).exists()]
    head |= {"tags": ["shardc"], **({"library_name": library[-1]} if library else {})}
    versions = [f"{n} {sys.modules[n].__version__}" for n in ("torch", "transformers") if n in sys.modules]
    versions += [f"shardc {VERSION}", f"Python {platform.python_version()}"]
    rows = {"base": name, **facts, "made with": ", ".join(versions)}
    table = ["| | |", "|---|---|", *(f"| {k} | {_cell(x)} |" for k, x in rows.items() if x not in (None, ""))]
    parts = [f"---\n{yaml.safe_dump(head)}---\n{MARK}", f"# {folder.resolve().name}", "\n".join(table)]
    if spec:
        fence = "`" * max(3, *(len(x) + 1 for x in re.findall("`+", spec)), 3)
        parts.append(f"Trained on several devices as on one, by this spec:\n\n{fence}yaml\n{spec.strip()}\n{fence}")
    file.write_text("\n\n".join(parts) + "\n")
    return True


def of_export(folder: Path, base: Path | None, checkpoint: Path) -> None:
    """Write the card of an exported checkpoint: that of the run, if it is beside the checkpoint, or a short one."""
    at = checkpoint.resolve()
    cards = (x / "README.md" for x in (at, *at.parents[:2]))
    text = next((x for f in cards if f.is_file() and MARK in (x := f.read_text(errors="replace"))), None)
    if folder.is_dir() and write(folder, base, {"checkpoint": at.name}) and text is not None:
        (folder / "README.md").write_text(text)


def _of_base(base: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of a base and the metadata to take over. From the hub's cache it has its name there."""
    of_hub = re.search(r"/models--([\w.-]+?)--([\w.-]+)/", f"{base}/")
    name = f"{of_hub[1]}/{of_hub[2]}" if of_hub else base.name
    more = {"base_model": name} if of_hub else {}
    card = base / "README.md"
    front = re.match(r"---\n(.*?)\n---\n", card.read_text(errors="replace"), re.DOTALL) if card.is_file() else None
    try:
        head = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        head = None
    return name, more | ({k: head[k] for k in _INHERITED if k in head} if isinstance(head, dict) else {})


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
