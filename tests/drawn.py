"""What one device draws: transformers' own `generate`, its temperature, top-k and top-p, with shardc's numbers.

Drawing is taking the largest of scores to which noise was added (the Gumbel-max trick): so transformers is asked for
greedy tokens of scores that its own processors have made, and the noise of (seed, step, row, token) behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shardc.features.generation.sampling import STREAM
from shardc.runtime import rng


class Noise(LogitsProcessor):  # type: ignore[misc]
    """Of a batch whose rows are these of the call."""

    def __init__(self, seed: int, rows: list[int]) -> None:
        self.seed, self.rows, self.step = seed, torch.tensor(rows), 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = self.rows[:, None] * scores.shape[1] + torch.arange(scores.shape[1])
        u = rng.uniform(rng.key(self.seed, STREAM, self.step), index, torch.float64) + 2.0**-33
        self.step += 1
        return scores.double() - (-u.log()).log()


def processors(options: dict[str, Any], rows: list[int]) -> LogitsProcessorList:
    """What `generate(do_sample=False, logits_processor=...)` takes for the options of `engine.generate`; none where
    nothing is drawn.
    """
    if not options.get("temperature"):
        return LogitsProcessorList()
    found = [TemperatureLogitsWarper(float(options["temperature"]))]
    if "top_k" in options:
        found.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        found.append(TopPLogitsWarper(options["top_p"]))
    return LogitsProcessorList([*found, Noise(options.get("seed", 0), rows)])
