"""Define what a program stores of the choices that it records."""

from __future__ import annotations

#: What `Program.features` may hold of this feature: the names of the outputs that are choices, and their weights.
STORED = {"choices": tuple[str, ...]}
