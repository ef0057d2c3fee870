"""Rows of tokens of chats and documents, and mixtures (docs/how-to/text.md): names of the feature `text`.

chats        rows of conversations, with labels on the assistant's tokens      read     records of a .jsonl file
documents    rows of texts, for pretraining                                    example  a batch of such rows
mix          several datasets as one, by weights
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.optional import needed

if TYPE_CHECKING:
    from shardc.features.text.mixture import mix as mix
    from shardc.features.text.records import read as read
    from shardc.features.text.rows import chats as chats
    from shardc.features.text.rows import documents as documents
    from shardc.features.text.rows import example as example

#: Public name -> the file of the feature that defines it.
_FILES = {"chats": "rows", "documents": "rows", "example": "rows", "mix": "mixture", "read": "records"}
__all__ = list(_FILES)


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module 'shardc.text' has no attribute {name!r}")
    return needed("text", _FILES[name], name)
