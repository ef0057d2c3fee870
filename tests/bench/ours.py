"""shardc as a contender, and how much of what it sends in the background is sent while it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import held
import llama
from torch import Tensor

from shardc import load
from shardc.runtime.mesh import TorchMesh, Work
from shardc.runtime.stage.communicators import groups_of


class Contender:
    """Call it with a global batch; `overlap()` then reports on the steps since its last call."""

    def __init__(self, artifact: Path, model: Any, options: dict[str, Any]) -> None:
        program = load(artifact)
        self._mesh = TimedMesh(program.mesh, groups_of(program), lines=(program.axis,) if program.axis else ())
        self._engine = program.engine(model, optimizer=llama.optimizer, mesh=self._mesh, **options)
        self._steps = 0

    def __call__(self, batch: dict[str, Tensor]) -> float:
        self._steps += 1
        return float(self._engine.step(batch))

    def expert_bytes(self) -> int:
        """See held.py."""
        engine = self._engine
        assert engine.optimizer is not None
        return held.of_experts(((engine.program.param(n).fqn, p) for n, p in engine.params.items()), engine.optimizer)

    def overlap(self) -> dict[str, dict[str, float]]:
        """{"sums", "gathers": {"seconds": under way in a step, "waited": of these, while nothing was computed}}, means
        over steps.
        """
        sent, steps = self._mesh.sent, self._steps
        self._mesh.sent, self._steps = {kind: [] for kind in sent}, 0
        return {
            kind: {
                "seconds": _covered((x.begun, x.ended) for x in collectives if x.ended) / steps,
                "waited": sum(max(0.0, x.ended - x.waited) for x in collectives if x.ended) / steps,
            }
            for kind, collectives in sent.items()
        }


@dataclass
class Sent:
    """A collective in the background, in seconds of one clock: begun, waited for, ended (its tensor is ready)."""

    begun: float
    waited: float = 0.0
    ended: float = 0.0


class _Timed(Work):
    """Work that is looked at: it ends when its tensor has come, or when what is left to do with that (a local sum) is
    done in `wait`.
    """

    def __init__(self, work: Work, sent: Sent) -> None:
        super().__init__(work._handle, work._then)
        self._sent, self._came = sent, 0.0
        self._handle.get_future().add_done_callback(self._arrived)

    def _arrived(self, _: Any) -> None:
        self._came = time.perf_counter()

    def wait(self) -> None:
        if self._handle is not None:
            more, self._sent.waited = self._then is not None, time.perf_counter()
            super().wait()
            self._sent.ended = self._came if self._came and not more else time.perf_counter()


class TimedMesh(TorchMesh):
    """Notes in `.sent` what runs in the background: "sums" of gradients, "gathers" of parameters."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: dict[str, list[Sent]] = {"sums": [], "gathers": []}

    def _all_reduce(self, flat: Tensor, axes: tuple[str, ...], op: str, tag: str, background: bool) -> Work:
        return self._looked_at("sums", super()._all_reduce, flat, axes, op, tag, background)

    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work:
        return self._looked_at("sums", super()._reduce_scatter, flat, part, axis, tag, background)

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        return self._looked_at("gathers", super()._all_gather, part, whole, axis, tag, background)

    def _looked_at(self, kind: str, start: Callable[..., Work], *args: Any) -> Work:
        if not args[-1]:  # in the foreground
            return start(*args)
        sent = Sent(time.perf_counter())
        self.sent[kind].append(sent)
        return _Timed(start(*args), sent)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of a union of intervals."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
