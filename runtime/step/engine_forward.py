"""What an engine computes without training: losses of other batches, scores, new tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc import torch_modes
from shardc.errors import ShardcError
from shardc.ir.outputs import MEAN_SCORE, SCORE
from shardc.runtime.data import inputs
from shardc.runtime.generate import Generator, Options, Prompts
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import Fact, stated
from shardc.runtime.stage import outputs
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import Values
from shardc.runtime.step import batch_sizes
from shardc.runtime.step.engine_state import EngineState
from shardc.runtime.step.means import LOSS, NO_DIVISOR, MeanDivisors, Means


class NoBatchesError(ShardcError):
    """Held-out data gave no batch at all: there is no mean."""

    def __init__(self, call: str, given: Any) -> None:
        fix = "give it one batch at least: is the split empty, shorter than a batch with drop_last=True, or an iterator"
        what = "there is no batch"
        if given is None:
            what = "there are no batches: None"
        super().__init__(what, where=call, fix=f"{fix} that was read to its end before?")


class EngineForward(EngineState):
    """The part of `shardc.runtime.step.engine.Engine` that runs forward alone."""

    def _tell_changes(self) -> None:
        raise NotImplementedError

    def _tell(self, note: str) -> None:
        raise NotImplementedError

    def _facts(self) -> list[Fact]:
        raise NotImplementedError

    def _take(self, batch: Any, *, local: bool, use: batch_sizes.Use) -> tuple[Interpreter, list[dict[str, Any]]]:
        raise NotImplementedError

    def evaluate(self, batch: Any, *, local: bool = False, gather: bool = False) -> Any:
        """What `step` returns, without dropout and with BatchNorm's running statistics; nothing changes.

        Where forward has branches of its own on `self.training`, the model is compiled in eval mode for it, once.
        """
        interpreter, _, loss, beside = self._evaluate(batch, local=local)
        return outputs.result(interpreter.program, self.mesh, loss, beside, gather=gather)

    def score(self, batch: Any, *, local: bool = False, gather: bool = False) -> Tensor:
        """The log-probability that the model gives to each target of its loss's cross entropy, in the form that the
        targets have in the batch (`labels`, [batch, sequence]), in float32 at least; 0 where the loss ignores one.
        Without dropout; nothing changes. This rank's rows; gather=True: all rows, on every rank.

        The first call compiles a forward-only program for it, on the same parameters: logits stay split by their
        classes, and are computed a few rows at a time. Raises ShardcError where the loss has no cross entropy of class
        indices, or several.
        """
        interpreter, _, _, values = self._evaluate(batch, local=local, use="score")
        named = outputs.result(interpreter.program, self.mesh, None, values, gather=gather)
        score: Tensor = named[SCORE]
        return score

    def score_all(
        self, batches: Iterable[Any], *, local: bool = False, each: Callable[[Tensor], None] | None = None
    ) -> dict[str, float]:
        """Of what `score` gives for all batches: {"tokens": how many targets count, "logprob": their mean
        log-probability, "perplexity": exp(-logprob)}; exact on any mesh. Raises NoBatchesError without any batch.

        each: called on every rank with the scores of all rows of each batch.
        """
        means = Means()
        for batch in _some("engine.score_all", batches):
            interpreter, _, _, values = self._evaluate(batch, local=local, use="score")
            program = interpreter.program
            means.add(program, None, values, 1, {})
            if each is not None:
                each(outputs.result(program, self.mesh, None, values, gather=True)[SCORE])
        found = means.values()
        mean = found[MEAN_SCORE]
        return {"tokens": means.counted(MEAN_SCORE), "logprob": mean, "perplexity": math.exp(-mean)}

    def evaluate_all(self, batches: Iterable[Any], *, local: bool = False) -> dict[str, float]:
        """{"loss": ..., name: ...} over all batches, of what `evaluate` gives: (sum, count) pairs by their sums, whole
        numbers added up; the loss and other means weighed by what they are the mean of, as many tokens as each batch
        counts (shardc.runtime.step.means); other single numbers by the batches' rows, with a note where that
        is the loss. Raises NoBatchesError without any batch.
        """
        means = Means()
        divisors: dict[int, MeanDivisors] = {}
        by_rows = False
        for batch in _some("engine.evaluate_all", batches):
            interpreter, values, loss, beside = self._evaluate(batch, local=local)
            program = interpreter.program
            if id(program) not in divisors:
                divisors[id(program)] = MeanDivisors(program)
            divided_by = divisors[id(program)].of(self.mesh, values)
            means.add(program, loss, beside, inputs.rows(program), divided_by)
            by_rows = loss is not None and LOSS not in divided_by
        if by_rows:
            self._tell(NO_DIVISOR)
        return means.values()

    @torch.no_grad()
    def _evaluate(
        self, batch: Any, *, local: bool, use: batch_sizes.Use = "evaluate"
    ) -> tuple[Interpreter, Values, Tensor | None, outputs.Values]:
        self._check()
        torch_modes.check("engine.evaluate", self.mesh.device.type, training=False)
        self._tell_changes()
        self.buckets.reset(forward=True)
        self.rng.training = False
        interpreter, values = self._take(batch, local=local, use=use)
        interpreter.count(values)
        return interpreter, values, *interpreter.evaluate(values)

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 20,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Iterable[int] | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """The new tokens of each prompt, with the weights as they stand: on every rank, up to and with the first of
        `stop` (None: the end tokens of the model's configuration). Nothing changes. All ranks give the same prompts.

        prompts: lists of token ids, of any lengths; i64[rows, length]; or a tokenizer's dict; of a model with an
        encoder, what that is given (shardc.runtime.generate.prompts). temperature 0: the most likely token each time;
        else drawn, by counters of `seed`, so that every mesh draws the same (shardc.runtime.generate). The first call
        of a length compiles for it. Raises ShardcError for a model that is not causal.
        """
        ends = tuple(stop) if stop is not None else None
        options = Options(max_new_tokens, temperature, top_k, top_p, ends, seed)
        asked = Prompts.of(prompts)
        self._check()
        torch_modes.check("engine.generate", self.mesh.device.type, training=False)
        self._tell_changes()
        self._gather_written()
        if self._checks:
            facts = [stated("what is generated", (asked, options), fix="give all ranks the same prompts and options")]
            agreement.check(self.mesh, [*facts, *self._facts()], "generating")
        self.rng.training = False
        return self._generator(asked, options)

    @cached_property
    def _generator(self) -> Generator:
        def stored() -> dict[str, Any]:
            self.buckets.reset(forward=True)
            return {"mesh": self.mesh, "rng": self.rng, **self.buckets.given, **self.buffers}

        return Generator(self.program, self.mesh, stored, self._tell)


def _some(call: str, batches: Any) -> Iterator[Any]:
    """They, one at least. Raises NoBatchesError, and ShardcError for what cannot be read one after the other."""
    if batches is None:
        raise NoBatchesError(call, None)
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        what, fix = f"{batches!r} is no iterable of batches", f"{call}([batch]), or a DataLoader"
        raise ShardcError(what, where=call, fix=fix)
    none = True
    for batch in batches:
        none = False
        yield batch
    if none:
        raise NoBatchesError(call, batches)
