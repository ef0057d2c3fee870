"""Define `ShardcError`, the one exception that users see, and `Errors`, which collects several.

Every mistake that a user can make (in a spec, in a model file, on the command line) is a `ShardcError` that says
*where* it is, *what* is wrong and how to *fix* it. Independent mistakes are collected and raised together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardc.layer_names import fold

#: At most so many errors are shown.
SHOWN = 40
#: Prefix of each error that a command prints.
ERROR = "error "


class ShardcError(Exception):
    """A mistake in the input, or several of them.

    where: place of the mistake: `spec.yaml:7:3`, a module or parameter name, an op with its model line; may be "".
    what:  what is wrong, one sentence.
    fix:   what to do, one sentence; may be "" where that is not known.
    errors: the single errors that this one combines; `(self,)` for a single error.
    on_all_ranks: True in a class whose errors all ranks raise together: a rank need not report them to the others.
    """

    on_all_ranks = False

    def __init__(self, what: str, *, where: str = "", fix: str = "", errors: Iterable[ShardcError] = ()) -> None:
        self.where, self.what, self.fix = _printable(where), _printable(what), _printable(fix)
        self.errors: tuple[ShardcError, ...] = tuple(errors) or (self,)
        super().__init__(self.what)

    def __str__(self) -> str:
        if self.errors != (self,):
            return "\n".join(self.texts())
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head

    def texts(self) -> list[str]:
        """Return the single errors as text; errors that differ only in layer numbers are merged."""
        if self.errors == (self,):
            return [str(self)]
        folded = fold(str(e) for e in self.errors)
        more = len(folded) - SHOWN
        return folded if more < 1 else [*folded[:SHOWN], f"... and {more} more errors: mend these first"]

    def text(self) -> str:
        """Return the errors as the commands print them: each begins with the word "error"."""
        return "\n".join(f"{ERROR}{text}" for text in self.texts())

    def to_json(self) -> list[dict[str, str]]:
        """Return the single errors as plain values: where, what, fix."""
        return [{"where": e.where, "what": e.what, "fix": e.fix} for e in self.errors]


def _printable(text: str) -> str:
    """Escape control characters, so that names and keys of the input cannot control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class Errors:
    """Collects errors, so that a user sees all of them at once.

    errors = Errors()
    with errors.collect():      # one independent check; its ShardcError is kept, not raised
        check_this()
    errors.add("what", where="...", fix="...")
    errors.raise_any()
    """

    def __init__(self) -> None:
        self.found: list[ShardcError] = []

    def add(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.found.append(ShardcError(what, where=where, fix=fix))

    @contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        except ShardcError as e:
            self.found.extend(e.errors)

    def raise_any(self) -> None:
        """Raise the collected error, or all of them as one; return if there is none."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ShardcError(
                f"{len(self.found)} errors", where=self.found[0].where, fix=self.found[0].fix, errors=self.found
            )
