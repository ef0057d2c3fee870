"""Match patterns of a spec against the names of a model, and explain those that match nothing.

Passes check one section after the other against the graph. Patterns that no name of the model matches are known
earlier. So if a spec has other mistakes, these patterns are reported with them, all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardc.errors import Errors
from shardc.ir.patterns import enclosing, expand, match, matches, names_weight
from shardc.ir.similar_names import SEE_NAMES, did_you_mean
from shardc.layer_names import of_every_layer
from shardc.optional import registered
from shardc.spec.schema import Form
from shardc.spec.yaml_reader import Path, Places

if TYPE_CHECKING:
    from torch import nn

#: Limit of patterns for which a similar name is searched, as that takes time.
HELPED = 20


@dataclass(frozen=True)
class Names:
    """The names of a model. weights: its parameters, with their shapes; modules: its modules."""

    weights: Mapping[str, tuple[int, ...]]
    modules: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        from torch.nn.parameter import is_lazy  # a spec is read without torch

        # a lazy module's parameter has no shape yet: capture reports that
        weights = {
            name: () if is_lazy(p) else tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)
        }
        return cls(weights, tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name))

    @classmethod
    def of_weights(cls, weights: Mapping[str, tuple[int, ...]]) -> Names:
        """Build names from parameters alone: the modules are those that contain them."""
        modules = dict.fromkeys(m for name in weights for m in enclosing(name)[:-1])
        return cls(weights, tuple(modules))

    @cached_property
    def owners(self) -> frozenset[str]:
        """The modules that have their own weights."""
        return frozenset(name.rpartition(".")[0] for name in self.weights)

    def has_weights(self, pattern: str) -> bool:
        """Return whether a pattern matches a parameter, or a module with its own parameters."""
        return any(names_weight(pattern, name) for name in self.weights)

    def without_weights(self, pattern: str, *, help_: bool = True) -> tuple[str, str]:
        """Return why a pattern matches no weight, and the fix. help_: search for a similar name."""
        wrapper = next((m for m in self.modules if match(pattern, m)), "")
        layer = self._layer(wrapper) if wrapper else ""
        if layer:
            inner = of_every_layer(layer)
            return (f"matches {wrapper}, which has no weight itself", f"name the layer in it: {f'{pattern}.{inner}'!r}")
        names = sorted({*self.weights, *self.owners})
        fix = did_you_mean(pattern, names, SEE_NAMES) if help_ else SEE_NAMES
        return "matches no parameter and no module of the model", fix

    def _layer(self, module: str) -> str:
        """Return the module inside another with the largest weight: the layer that an adapter (LoRA) wraps."""
        inside = {n: s for n, s in self.weights.items() if n.startswith(f"{module}.")}
        largest = max(inside, key=lambda n: (len(inside[n]) > 1, math.prod(inside[n])), default="")
        return largest.rpartition(".")[0].removeprefix(f"{module}.")

    def idle_alternatives(self, pattern: str) -> Iterator[str]:
        """Yield a note for each alternative of a pattern that matches no weight while another one does."""
        alternatives = expand(pattern)
        if 1 < len(alternatives) <= HELPED:
            for option in alternatives:
                if not self.has_weights(option):
                    fault, fix = self.without_weights(option)
                    yield f"of {pattern!r} the alternative {option!r} {fault}: {fix}"

    def check_weights(
        self, patterns: Iterable[tuple[Path, str, bool]], where: Callable[[Path], str], errors: Errors
    ) -> set[Path]:
        """Add an error for each pattern that names no weight, and return their places.

        patterns: (place in the spec, pattern, whether it may name a module whose weights are all in modules inside).
        """
        wrong = [
            (path, text)
            for path, text, inside in patterns
            if not self.has_weights(text) and not (inside and any(match(text, m) for m in self.modules))
        ]
        for i, (path, text) in enumerate(wrong):
            fault, fix = self.without_weights(text, help_=i < HELPED)
            errors.add(f"pattern {text!r} {fault}", where=where(path), fix=fix)
        return {path for path, _ in wrong}

    def check(self, form: Form, places: Places, errors: Errors) -> None:
        """Add an error for every pattern of a spec that matches no name of the model."""
        weights = ((("shard", pattern), pattern, False) for pattern in form.shard.rules)
        of_features = (x for sections in registered("section", "Sections") for x in sections.patterns(form))
        helped = len(self.check_weights([*weights, *of_features], places.where, errors))
        cuts = form.pipeline.cut if form.pipeline and form.pipeline.cut else ()
        modules: list[tuple[str, Path]] = [
            *((key.removesuffix(":in"), ("activations", key)) for key in form.activations),
            *((e.match, ("experts", i, "match")) for i, e in enumerate(form.experts)),
            *((c.match, ("checkpoint", i, "match")) for i, c in enumerate(form.checkpoint)),
            *((name, ("pipeline", "cut", i)) for i, name in enumerate(cuts)),
        ]
        for pattern, path in modules:
            if not any(match(pattern, m) for m in self.modules):
                helped += 1
                fix = did_you_mean(pattern, self.modules, SEE_NAMES) if helped <= HELPED else SEE_NAMES
                errors.add(f"pattern {pattern!r} matches no module of the model", where=places.where(path), fix=fix)


@dataclass(frozen=True)
class Selector:
    """A pattern of the spec that selects modules. where: its place in the spec.

    shown: how errors quote it, if not as the pattern. group: patterns compete for a module only within their group.
    every: of the modules that the pattern matches, every `every`-th is selected, from the first on.
    """

    pattern: str
    where: str
    shown: str = ""
    group: str = ""
    every: int = 1


def select_modules(
    selectors: Sequence[Selector], modules: Sequence[str], aliases: Mapping[str, Sequence[str]], errors: Errors
) -> list[list[str]]:
    """Return for each selector the outermost modules that match and that no earlier selector has taken.

    They are in the order of `modules`. `layers.*` means the layers and not everything in them, though `*` matches dots
    too. aliases: see `matches`. Adds an error for every pattern that matches nothing, or that never wins.
    """
    taken: set[tuple[str, str]] = set()
    selected = []
    for s in selectors:
        matched = {m for m in modules if matches(s.pattern, m, aliases)}
        outermost = [m for m in modules if m in matched and matched.isdisjoint(enclosing(m)[:-1])]
        shown = repr(s.shown or s.pattern)
        if not outermost:
            fix = did_you_mean(s.pattern, sorted(modules), SEE_NAMES)
            errors.add(f"pattern {shown} matches no module that computes anything", where=s.where, fix=fix)
        elif all((s.group, m) in taken for m in outermost):
            fault = f"pattern {shown} never wins: earlier patterns match all modules that it matches"
            errors.add(fault, where=s.where, fix="delete it, or move it up")
        selected.append([m for m in outermost[:: s.every] if (s.group, m) not in taken])
        taken |= {(s.group, m) for m in selected[-1]}
    return selected
