"""Ready-made specs, each one an end-to-end test: `shardc run examples/gpt.py $(python -c 'import shardc.specs as s;
print(s.path("gpt"))')`.
"""

from __future__ import annotations

from pathlib import Path

from shardc.errors import ShardcError

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The ready specs: `llama`, `llama-sp`, ..."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml"))


def path(name: str) -> Path:
    """The file of a ready spec. Raises ShardcError with the names there are."""
    if name not in names():
        raise ShardcError(
            f"there is no ready spec {name!r}", where="shardc.specs.path", fix=f"one of {', '.join(names())}"
        )
    return FOLDER / f"{name}.yaml"
