"""Define `optimizer`: the matrices of each parameter, for optimizers that need whole matrices.

    matrices: {"*": whole, "*.qkv.weight": {0: 3}}     a fused weight [3 * 64, 64] is three matrices [64, 64]

See program.py for the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.spec import Spec, optimizer_section
from shardc.spec.fields import Pattern, Section, is_dim, malformed, unknown, wrong_here

#: How parameters are cut into the matrices of an optimizer: not at all; one for each head of attention; one for
#: each entry of a stack of experts.
CUTS = ("whole", "heads", "experts")


def _cut(value: Any) -> Any:
    """Check a word, {dim: number of parts} or {dim: sizes}; return the word, or a mapping of integers."""
    if isinstance(value, str):
        if value not in CUTS:
            raise unknown("way to cut a parameter", CUTS, "or {dim: parts}, e.g. {0: 3}")
        return value
    if not isinstance(value, Mapping) or not value:
        raise malformed(f"a word ({', '.join(CUTS)}) or a mapping from dim to parts", "e.g. whole, or {0: 3}")
    cuts: dict[int, int | tuple[int, ...]] = {}
    for dim, parts in value.items():
        if not is_dim(dim) or int(dim) < 0:
            raise wrong_here("names a dim that is not a whole number", "e.g. {0: 3}: dim 0 is three matrices")
        sizes = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)
        if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise wrong_here("cuts a dim by values that are not sizes", "e.g. {0: 3}, or {0: [512, 128, 128]}")
        cuts[int(dim)] = sizes if isinstance(parts, (list, tuple)) else parts
    return cuts


def _matrices(value: Any) -> Any:
    """Expand one word to all parameters."""
    if isinstance(value, str):
        return {"*": value}
    if not isinstance(value, Mapping) or not value:
        raise malformed(f"a word ({', '.join(CUTS)}) or a mapping from pattern to one", "e.g. matrices: whole")
    return {"*": value} if all(map(is_dim, value)) else value


_CUT: dict[str, Any] = {
    "anyOf": [
        {"enum": list(CUTS)},
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": False,
            "patternProperties": {
                "^[0-9]+$": {
                    "anyOf": [
                        {"type": "integer", "minimum": 1},
                        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1}},
                    ]
                }
            },
        },
    ]
}


_MATRICES: dict[str, Any] = {
    "anyOf": [{"enum": list(CUTS)}, {"type": "object", "minProperties": 1, "additionalProperties": _CUT}]
}


class Optimizer(optimizer_section.Optimizer):
    __doc__ = f"""{optimizer_section.Optimizer.__doc__}
    matrices: for optimizers whose step of a parameter needs all of it (Muon, Shampoo, SOAP, Adafactor, LAMB): each
    matrix has an owner, a rank that steps it. What steps each element by itself (AdamW) is split.
    """

    matrices: (
        Annotated[
            dict[Pattern, Annotated[Any, BeforeValidator(_cut)]], BeforeValidator(_matrices), WithJsonSchema(_MATRICES)
        ]
        | None
    ) = Field(
        default=None,
        description="which part of a parameter is one matrix: whole, heads, experts, {dim: parts}, or these by pattern",
        examples=["whole", {"*.qkv.weight": {0: 3}}],
    )


class Sections(Section):
    """The section of core that this feature extends."""

    optimizer: Optimizer = Field(default=Optimizer(), examples=[{"name": "adamw", "lr": 3e-4}])

    def patterns(self) -> Iterator[tuple[tuple[str | int, ...], str, bool]]:
        """Yield (place, pattern, False: it must name a weight) of each pattern."""
        yield from ((("optimizer", "matrices", text), text, False) for text in self.optimizer.matrices or ())


def rules(spec: Spec) -> dict[str, Any] | None:
    """Return {pattern: which part of a parameter is one matrix}; None if the spec does not say."""
    return getattr(spec.optimizer, "matrices", None)


def spans_layers(spec: Spec) -> bool:
    """Return whether a decision needs all layers: owners are balanced over the matrices of all."""
    return rules(spec) is not None
