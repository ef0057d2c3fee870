"""Import names of a package on first use (PEP 562), so that a caller loads only the modules it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def names_loaded_later(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package. modules: {name: the module that defines it}."""

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get
