"""What decides about a model besides its own source and settings: shardc's source, other packages, the environment."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

#: How settings begin that transformers and torch read from the environment.
SETTINGS = ("TRANSFORMERS_", "HF_", "USE_", "TORCH_", "PYTORCH_")


@functools.cache
def shardc_source() -> str:
    """A digest of the package's own files."""
    digest = hashlib.sha256()
    for package in ("shardc", "shardc.passes", "shardc.runtime"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        top = Path(spec.origin).parent
        for path in sorted(top.rglob("*.py")):
            digest.update(str(path.relative_to(top)).encode() + path.read_bytes())
    return digest.hexdigest()


def installed() -> list[str]:
    """Names and versions of installed packages, as their folders say, of Python and of shardc's source."""
    folders = {
        Path(p or ".") for p in sys.path if Path(p).name != "_vendor"
    }  # which setuptools adds when it is imported
    found = {x.name for folder in folders if folder.is_dir() for x in folder.glob("*.dist-info")}
    return [sys.version, shardc_source(), *sorted(found)]


def settings() -> list[str]:
    """What of torch's state and the environment a model may depend on."""
    found = sorted(f"{k}={x}" for k, x in os.environ.items() if k.startswith(SETTINGS))
    torch = sys.modules.get("torch")
    dtype = str(torch.get_default_dtype()) if torch is not None else "torch.float32"
    return [dtype, *found]
