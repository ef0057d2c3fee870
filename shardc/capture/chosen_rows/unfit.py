"""Why something done with chosen rows cannot be traced: the error that all files here raise."""

from __future__ import annotations

from shardc.errors import ShardcError


class Unfit(ShardcError):
    """What is done with chosen rows is not done to each row by itself."""

    def __init__(self, what: str) -> None:
        super().__init__(f"rows chosen by a mask: {what}")
