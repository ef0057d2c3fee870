"""Call the user's callbacks at the moments of a run.

A function is called after each step, with the engine and the step's result. An object may have any of these methods,
which get the engine and what the table says:

    run_begins   facts of the run: model, mesh, steps, the step where it begins, settings, the spec
    step_done    the result of `engine.step`, whose tensors may still be on the device
    logged       a line of steps.jsonl, as numbers; every `--log-every` steps, one for each step
    evaluated    held-out values
    saved        the folder of a checkpoint that is on the disk
    run_ends     the summary, with `state`: finished, stopped early, interrupted or failed

Engines call `step_done`; `shardc run` calls the others. Callbacks are called on all ranks, so that they may save or
evaluate; one with `rank0 = True` on the first rank alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest
from shardc.runtime.data.sample_errors import add_note

MOMENTS = ("run_begins", "step_done", "logged", "evaluated", "saved", "run_ends")


class Callbacks(list[Any]):
    """The callbacks of an engine. Raises ShardcError for those that nothing would call."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        super().__init__(callbacks)
        for i, one in enumerate(self):
            fault, fix, none = "", ", ".join(MOMENTS), not any(hasattr(one, moment) for moment in MOMENTS)
            if inspect.isclass(one):
                fault, fix = f"this is the class {one.__name__}, not an object", f"write {one.__name__}()"
            elif not (none and callable(one)):
                near = _misspelt(one)
                if none:
                    fault = f"a {type(one).__name__} has none of the methods that a run calls, and is no function"
                elif near:
                    fault = f"nothing calls {', '.join(near)} of a {type(one).__name__}"
                    fix += "; a name that begins with _ is yours"
                fix = "".join(f"did you mean {m!r} by {n!r}? " for n, m in near.items() if m) + fix
            if fault:
                raise ShardcError(fault, where=f"callbacks[{i}]", fix=fix)

    def call(self, moment: str, engine: Any, facts: Any) -> None:
        """Call the callbacks that have this moment. An error has a note with the callback's name."""
        for one in self:
            is_function = moment == "step_done" and not any(hasattr(one, m) for m in MOMENTS)
            method = one if is_function else getattr(one, moment, None)
            mesh, alone = engine.mesh, getattr(one, "rank0", False)
            if method is None or (alone and mesh.rank):
                continue
            mesh.activity.callback = name = f"{getattr(one, '__name__', type(one).__name__)}, {moment}"
            mesh.activity.alone = alone and mesh.layout.world > 1
            try:
                method(engine, facts)
            except Exception as e:
                add_note(e, f"in the callback {name}")
                raise
            finally:
                mesh.activity.callback, mesh.activity.alone = "", False


def _misspelt(one: Any) -> dict[str, str]:
    """Return methods of a callback that look as if a run called them, and the moment that each may mean."""
    others, near = [m for m in MOMENTS if not hasattr(one, m)], dict[str, str]()
    for name in dir(one):
        event = name.startswith("on_")
        if not name.startswith("_") and name not in MOMENTS and callable(inspect.getattr_static(one, name, None)):
            moment = nearest(name.removeprefix("on_"), others, cutoff=0.5 if event else 0.75)
            near |= {name: moment} if moment or event else {}
    return near
