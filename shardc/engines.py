"""Weights for inference engines (docs/how-to/engines.md): names of the feature `reshard`.

Layout         where an engine keeps weights: layout.json      here      ranks of the engine in the same processes
vllm, sglang   layouts by their conventions                    at        in other processes, which call `receive`
transformers   the layout of a model's own tp_plan             files     a file for each rank of the engine
described      the layout that an engine describes             through   over a transport of yours
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.optional import needed

if TYPE_CHECKING:
    from shardc.features.reshard.conventions import described as described
    from shardc.features.reshard.conventions import sglang as sglang
    from shardc.features.reshard.conventions import vllm as vllm
    from shardc.features.reshard.engines import at as at
    from shardc.features.reshard.engines import files as files
    from shardc.features.reshard.engines import here as here
    from shardc.features.reshard.engines import receive as receive
    from shardc.features.reshard.engines import through as through
    from shardc.features.reshard.layout import Layout as Layout
    from shardc.features.reshard.tp_plan import transformers as transformers

#: Public name -> the file of the feature that defines it.
_FILES = {
    **dict.fromkeys(("described", "sglang", "vllm"), "conventions"),
    **dict.fromkeys(("at", "files", "here", "receive", "through"), "engines"),
    **{"Layout": "layout", "transformers": "tp_plan"},
}
__all__ = list(_FILES)


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module 'shardc.engines' has no attribute {name!r}")
    return needed("reshard", _FILES[name], name)
