"""Number the lines of the spec that the page shows, and find which of them caused what."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from shardc.errors import Errors
from shardc.ir.mesh import axes_of_spec
from shardc.ir.patterns import enclosing, match, names_weight
from shardc.ir.program import Program
from shardc.ir.stored import Bucket, Param
from shardc.spec import Spec
from shardc.spec.yaml_reader import dotted, read

#: Settings of the command line, as places cite them: `--mesh dp=4`, `--set data.zero=3`.
_OPTION = re.compile(r"--(?:mesh|set) \S+")


class SpecLines:
    """The lines of a program's spec as written, or, for a dict, as `str` writes it; numbered from 1.

    Settings of the command line that caused something follow, each as a line.
    """

    def __init__(self, program: Program) -> None:
        self.spec: Spec = program.spec
        meta = program.meta.get("spec", {})
        text = meta.get("text") or str(self.spec)
        self.file: str = meta.get("file", "")
        self.lines: list[str] = text.rstrip().splitlines()
        self._written = len(self.lines)
        self._cited = re.compile(rf"{re.escape(self.file)}:(\d+):\d+") if self.file else None

    @cached_property
    def _keys(self) -> dict[tuple[str | int, ...], int]:
        """The line of each key in the text."""
        places = read("\n".join(self.lines[: self._written]), "", Errors()).places.keys if self._written else {}
        return {path: int(place.split(":")[-2]) for path, place in places.items()}

    @cached_property
    def _by_path(self) -> list[tuple[str, int]]:
        """("spec: shard.use", its line) for each key, as causes cite a dict, the longest first."""
        pairs = [(f"spec: {dotted(path)}", line) for path, line in self._keys.items() if path]
        return sorted(pairs, key=lambda x: -len(x[0]))

    def of(self, cause: str) -> list[int]:
        """Return the lines that a cause cites."""
        lines = [self._option(text) for text in _OPTION.findall(cause)]
        if self._cited is not None:
            lines += [int(n) for n in self._cited.findall(cause) if int(n) <= self._written]
        elif cause.startswith("spec: "):
            lines += [line for place, line in self._by_path if cause.startswith(place)][:1]
        return list(dict.fromkeys(lines))

    def _option(self, text: str) -> int:
        if text not in self.lines[self._written :]:
            self.lines.append(text)
        return self.lines.index(text, self._written) + 1

    def at(self, *path: str | int) -> list[int]:
        """Return the line of a key, or of the nearest key around it."""
        place = self.spec.where(path)
        if _OPTION.match(place):
            return [self._option(place)]
        around = (path[:n] for n in range(len(path), 0, -1))
        return [self._keys[key] for key in around if key in self._keys][:1]

    def of_axes(self, axes: Iterable[str]) -> list[int]:
        """Return the lines that set the sizes of axes."""
        names = (name for axis in axes for name in axes_of_spec(axis))
        return list(dict.fromkeys(line for name in names for line in self.at("mesh", name)))

    def of_param(self, p: Param) -> list[int]:
        """Return the lines that split a parameter: an entry with its name, `use`, experts, or the mesh's axes."""
        return list(dict.fromkeys(line for axis, _ in p.layout.shards() for line in self._of_split(p, axis)))

    def activations(self, modules: Iterable[str]) -> list[dict[str, Any]]:
        """Return the entries of `activations`, with the outermost modules that each names."""
        entries = []
        for rule in self.spec.activations:
            key = f"{rule.pattern}:in" if rule.at == "input" else rule.pattern
            named = [m for m in modules if match(rule.pattern, m)]
            outermost = [m for m in named if not any(m.startswith(f"{other}.") for other in named)]
            dims = ", ".join(f"dim {d} over {'+'.join(s.axis for s in shards)}" for d, shards in rule.dims.items())
            text = f"{rule.at} of {', '.join(outermost) or rule.pattern}: {dims or 'whole'}"
            entries.append({"text": text, "lines": self.at("activations", key), "modules": outermost})
        return entries

    def _of_split(self, p: Param, axis: str) -> list[int]:
        names, base = (p.fqn, *p.names), axis.partition("[")[0]  # tp[0], a part of an axis
        for rule in self.spec.shard:
            named = match if rule.dims is not None else names_weight
            if any(named(rule.pattern, name) for name in names):
                return self.at("shard", rule.pattern)
        around = [module for name in names for module in enclosing(name)]
        for i, entry in enumerate(self.spec.experts):
            if entry.axis == base and any(match(entry.match, module) for module in around):
                return self.at("experts", i)
        use = self.spec.shard_use and self.spec.shard_axis == base
        return self.at("shard", "use") if use else self.of_axes((base,))

    def of_bucket(self, b: Bucket) -> list[int]:
        """Return the lines behind a bucket: ZeRO, and the axes over which the batch is split."""
        zero = self.at("data", "zero") if b.zero else []
        return list(dict.fromkeys([*zero, *self.of_axes((*b.axes, *filter(None, (b.shard,))))]))
