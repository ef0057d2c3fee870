"""Choose the next token of each row, from logits split over ranks by rows and vocabulary.

A sample is the largest of `logit / temperature + g`, where g has the standard Gumbel distribution: token i then has the
probability softmax(logits / temperature)[i] (Gumbel 1954; Maddison et al. 2014). A token's g is a function only of
seed, step, row and token (shardc.runtime.rng), so that every mesh draws the same.

A rank sends only the best tokens of each row: one without top_k and top_p; k for top_k; all it has for top_p without
top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.errors import Errors
from shardc.ir.outputs import Output
from shardc.ir.placement import Layout
from shardc.runtime import rng

#: The stream of sampling's random numbers: no op of a graph has it.
STREAM = 0x67656E


@dataclass(frozen=True)
class Options:
    """How tokens are chosen.

    tokens: the maximum for each row. temperature: logits are divided by it; 0: the most likely token. top_k: only the k
    most likely ones; top_p: only the most likely ones that together have this probability (Holtzman et al. 2020,
    "nucleus sampling"), after top_k, as in transformers. stop: a row ends with the first of these; None: those of the
    model's configuration. seed: of the random numbers.
    """

    tokens: int = 20
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        errors = Errors()
        whole = {"max_new_tokens": (self.tokens, 1), "seed": (self.seed, 0)}
        whole |= {"top_k": (self.top_k, 1)} if self.top_k is not None else {}
        for name, (x, least) in whole.items():
            if isinstance(x, bool) or not isinstance(x, int) or x < least:
                errors.add(f"must be a whole number of at least {least}, not {x!r}", where=name, fix="pass one")
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature < float("inf"):
            fault = f"must be a number of at least 0, not {self.temperature!r}"
            errors.add(fault, where="temperature", fix="pass 0 for greedy decoding, 1 for plain sampling")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            fault = f"must be above 0 and at most 1, not {self.top_p!r}"
            errors.add(fault, where="top_p", fix="pass a probability, such as 0.9")
        if not self.temperature and (self.top_k or self.top_p):
            fault = "temperature 0 does not sample: it takes the most likely token"
            errors.add(fault, where="top_k, top_p", fix="pass a temperature, such as 1.0, or leave them out")
        errors.raise_any()


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens. logits: the output `[rows, tokens]` that a rank has. rows, tokens: which ones, i64."""

    logits: Output
    mesh: Any
    rows: Tensor
    tokens: Tensor
    options: Options

    @classmethod
    def of(cls, logits: Output, mesh: Any, options: Options) -> Sampler:
        layout, at = mesh.layout, mesh.layout.coords(mesh.rank)

        def mine(dim: int) -> Tensor:
            alone = Layout(tuple((a, s) for a, s in logits.layout.items if (a, s) in logits.layout.shards(dim)))
            shape = [1, 1]
            shape[dim] = -1
            whole = torch.arange(logits.shape[dim]).reshape(shape)
            return alone.local(whole, layout, at).reshape(-1).to(mesh.device)

        return cls(logits, mesh, mine(0), mine(1), options)

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """Return the chosen tokens, i64[rows]. step: the number of tokens chosen before."""
        scores, ids = logits.double(), self.tokens.expand(logits.shape)
        o = self.options
        if not o.temperature:
            return self._best(scores, ids, 1)[1][:, 0]
        scores = scores / o.temperature
        if o.top_k is not None:
            scores, ids = self._best(scores, ids, o.top_k)
        elif o.top_p is not None:
            scores, ids = self._best(scores, ids, self.logits.shape[1])
        if o.top_p is not None:
            before = scores.softmax(-1).cumsum(-1).roll(1, -1)
            before[:, 0] = 0
            scores = scores.masked_fill(before >= o.top_p, float("-inf"))
        scores = scores + self._gumbel(ids, step)
        if o.top_k is None and o.top_p is None:
            return self._best(scores, ids, 1)[1][:, 0]
        return ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]

    def _gumbel(self, ids: Tensor, step: int) -> Tensor:
        key = rng.key(self.options.seed, STREAM, step)
        index = self.rows[:, None] * self.logits.shape[1] + ids
        u = rng.uniform(key, index.contiguous(), torch.float64) + 2.0**-33  # in (0, 1)
        return -(-u.log()).log()

    def _best(self, scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best of each row over all ranks, in order; of equal ones the first in the vocabulary."""
        scores, ids = _first(scores, ids, k)
        for axis, _ in self.logits.layout.shards(1):
            both = torch.stack([scores, ids.double()])  # ids are exact in float64
            every = self.mesh.all_gather(both.contiguous(), axis, tag="tokens").unbind(0)
            scores, ids = torch.cat([x[0] for x in every], 1), torch.cat([x[1] for x in every], 1).long()
            scores, ids = _first(scores, ids, k)
        return scores, ids


def _first(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if k == 1:
        best = scores.max(-1, keepdim=True).values
        none = torch.iinfo(torch.int64).max
        return best, torch.where(scores == best, ids, none).min(-1, keepdim=True).values
    ids, order = ids.sort(-1)
    scores, order = scores.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return scores[:, :k], ids.gather(1, order[:, :k])
