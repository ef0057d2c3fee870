"""What a module's dotted name says of repeated layers: "h.3.attn" is in layer 3 of the list "h"."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def layers_of(module: str) -> list[tuple[str, str]]:
    """(list of layers, the layer's number) for every list that a module or a parameter is in, outermost first.

    >>> layers_of("h.3.attn.2.weight"), layers_of("0.bias"), layers_of("head")
    ([('h', '3'), ('h.3.attn', '2')], [('', '0')], [])
    """
    return [(module[: max(m.start() - 1, 0)], m[0]) for m in _NUMBER.finditer(module)]


def layer_of(module: str) -> tuple[str, str] | None:
    """(outermost list of layers, the layer's number) that a module or a parameter is in; None if it is in none.

    >>> layer_of("h.3.attn.2.weight"), layer_of("0.bias"), layer_of("head")
    (('h', '3'), ('', '0'), None)
    """
    return next(iter(layers_of(module)), None)
