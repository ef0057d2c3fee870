"""Find the optional features, the folders of shardc.features, and name the extras of optional libraries.

Core reads what features register, and never imports one.

A feature registers by names in its files. Each table of core reads a name from all features on first use, as Django
reads the apps that its settings list; shardc.features lists the files and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from shardc.errors import ShardcError

#: Libraries that a user may lack -> the extra of shardc that installs them (pyproject.toml).
EXTRAS = {
    **dict.fromkeys(("transformers", "huggingface_hub", "peft"), "hf"),
    **dict.fromkeys(("datasets", "tokenizers", "jinja2"), "text"),
    **dict.fromkeys(("tensorboard", "wandb", "mlflow", "opentelemetry"), "track"),
}

#: The features, and the sections of a spec that each defines. Of passes for the same place, an earlier one's run first.
FEATURES = {
    "matrices": ("optimizer.matrices",),
    "adapters": ("adapters", "freeze"),
    "sequence": ("sequence",),
    "fp8": ("precision.products",),
    "choices": ("choices",),
    "parts": ("parts", "pipeline.meshes"),
    "reshard": (),
    "generation": (),
    "hub": (),
    "trackers": (),
    "text": (),
    "rows": ("batch.balance",),
}


def registered(file: str, name: str, features: Iterable[str] = FEATURES) -> Iterator[Any]:
    """Yield what `file` of each of these features calls `name`, if the feature is installed and has it."""
    for feature in features:
        module = _module(feature, file)
        if hasattr(module, name):
            yield getattr(module, name)


@cache
def table(file: str, name: str) -> dict[Any, Any]:
    """Return the entries of the tables that all features' `file` call `name`."""
    return {key: value for entries in registered(file, name) for key, value in entries.items()}


def needed(feature: str, file: str, name: str) -> Any:
    """Return what `file` of a feature calls `name`. Raises ShardcError if the feature is not installed."""
    for value in registered(file, name, (feature,)):
        return value
    fix = f"install shardc with shardc/features/{feature}"
    raise ShardcError(f"the feature {feature} is not installed", where=feature, fix=fix)


def missing(section: str) -> str:
    """Return the feature that defines a section of a spec but is not installed; "" if there is none."""
    of = (name for name, sections in FEATURES.items() if section in sections)
    return next((name for name in of if _module(name, "section") is None), "")


def _module(feature: str, file: str) -> ModuleType | None:
    package = f"shardc.features.{feature}"
    try:
        return import_module(f"{package}.{file}")
    except ModuleNotFoundError as e:
        if e.name not in ("shardc.features", package, f"{package}.{file}"):
            raise  # a library that the feature needs
        return None


def library(name: str, where: str) -> Any:
    """Import a library that a user may lack. where: what needs it. Raises ShardcError that names the extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not name.startswith(e.name):
            raise  # a library that it needs itself
        raise ShardcError(f"{e.name} is not installed", where=where, fix=install(e.name)) from None


def install(name: str) -> str:
    """Return the command that installs a library: by an extra of shardc, if one has it."""
    extra = EXTRAS.get(name.partition(".")[0])
    return f"pip install 'shardc[{extra}]'" if extra else f"pip install {name}"
