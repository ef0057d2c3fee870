"""Names of a package that are imported when they are first used (PEP 562): who needs one of its modules loads that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def names_loaded_later(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package. modules: {name: the module that defines it}."""

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get
