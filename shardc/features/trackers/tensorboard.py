"""Write the numbers of a run for TensorBoard, into the folder of --log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardc.features.trackers import runtime


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._board, self._step = SummaryWriter(run["log"], purge_step=run["begun"] + 1), run["begun"]
        self._text("config", "\n".join(f"{k}: {x}" for k, x in runtime.texts(run).items()))
        self._text("spec", run["spec"])
        return str(run["log"])

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._step = step
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._text("summary", json.dumps(dict(summary), indent=1))
        self._board.close()

    def _text(self, name: str, text: str) -> None:
        self._board.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), self._step)
