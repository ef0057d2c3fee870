"""What a module's dotted name says of a repeated layer: "h.3.attn" is in layer 3 of the list "h"."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:(.*?)\.)?(\d+)(?:\.|$)")


def layer_of(module: str) -> tuple[str, str] | None:
    """(outermost list of layers, the layer's number) that a module or a parameter is in; None if it is in none.

    >>> layer_of("h.3.attn.2.weight"), layer_of("0.bias"), layer_of("head")
    (('h', '3'), ('', '0'), None)
    """
    m = _LAYER.match(module)
    return (m[1] or "", m[2]) if m else None
