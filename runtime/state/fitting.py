"""Check that the tensors of a source of weights, or of a checkpoint, fit a program: their names and shapes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from shardc.errors import Errors

Shapes = Mapping[str, tuple[int, ...]]
#: If more names than this do not fit, they belong to another model.
_SHOWN = 8
SAVED_MODEL = "compile the model that was saved, with its config"


def check_tensors(
    errors: Errors, wanted: Shapes, present: Shapes, known: Iterable[str], where: str, fix: str = SAVED_MODEL
) -> None:
    """Check that every wanted name is present with its shape, and that every present name is known.

    Errors name similar names, or, if little fits, say that it is another model. fix: for that, and for other shapes.
    """
    known = set(known)
    extra = [n for n in present if n not in known]
    missing = [n for n in wanted if n not in present]
    other = [n for n, shape in wanted.items() if n in present and tuple(present[n]) != tuple(shape)]

    def shapes(name: str) -> str:
        return f"{name} has the shape {list(present[name])} in {where}, and {list(wanted[name])} in the program"

    if len(extra) + len(missing) + len(other) > _SHOWN or (missing and len(missing) == len(wanted)):
        kinds = ((other, "with another shape"), (missing, "missing"), (extra, "unknown to the program"))
        counts = ", ".join(
            f"{len(names)} {fault} ({names[0]}{', ...' if names[1:] else ''})" for names, fault in kinds if names
        )
        first = f"; {shapes(other[0])}" if other else ""
        errors.add(f"{where} is of another model: of {len(wanted)} tensors {counts}{first}", fix=fix)
        return
    for name in missing:
        near = difflib.get_close_matches(name, extra, 1)  # a known name is not misspelt
        missed = "if it is new, pass the file as `weights` (--weights): new parameters then keep their initial values"
        errors.add(f"{name} is missing in {where}", fix=f"did you mean {near[0]}, which it has?" if near else missed)
    for name in other:
        errors.add(shapes(name), fix=fix)
    for name in extra:
        near = difflib.get_close_matches(name, missing, 1)
        fix = f"did you mean {near[0]}?" if near else "add the tensor to the model again, or remove it from the weights"
        errors.add(f"{name} in {where} is unknown to the program", fix=fix)
