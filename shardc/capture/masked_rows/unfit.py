"""Why something done with chosen rows cannot be traced: the error that all files here raise."""

from __future__ import annotations

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.source import Source


class DrawnError(ShardcError):
    """Random numbers are drawn for chosen rows: one device draws as many as there are, a program for all rows."""

    def __init__(self, at: Source) -> None:
        super().__init__(
            "an expert draws random numbers for its rows (dropout), and how many rows it has depends on a tensor's"
            f" value ({at.shown})",
            where=at.line,
            fix="set the dropout inside of experts to 0, or put it behind them, where all tokens pass",
        )


class Unfit(ShardcError):
    """What is done with chosen rows is not done to each row by itself. at: the line of the model that does it."""

    def __init__(self, what: str) -> None:
        self.at = source.of_call()
        super().__init__(f"rows chosen by a mask: {what}", where=self.at.line)


def because(refused: ShardcError, error: ShardcError) -> ShardcError:
    """A refusal of what depends on values, at the line that rows chosen by a mask cannot pass either."""
    if not isinstance(error, Unfit) or not error.at.line or error.at.line == refused.where:
        return refused
    return ShardcError(f"{refused.what}; {error.what} ({error.at.shown})", where=error.at.line, fix=refused.fix)
