"""Compute without training: losses of other batches, scores, new tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.outputs import MEAN_SCORE, SCORE
from shardc.optional import needed
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.data import inputs
from shardc.runtime.mesh.agreement import stated
from shardc.runtime.stage import outputs
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.not_finite import NOTHING
from shardc.runtime.stage.run import Values
from shardc.runtime.step import batch_sizes
from shardc.runtime.step.local_model import LocalModel
from shardc.runtime.step.means import LOSS, NO_DIVISOR, SEVERAL_DIVISORS, MeanDivisors, Means


class NoBatchesError(ShardcError):
    """Held-out data has no batch: there is no mean."""

    def __init__(self, call: str, given: Any) -> None:
        fix = "pass at least one batch: is the split empty, shorter than a batch with drop_last=True, or an iterator"
        none = "there are no batches: None" if given is None else "there is no batch"
        super().__init__(none, where=call, fix=f"{fix} that was read to its end before?")


class Evaluation:
    """Runs forward only, as the engine's methods of these names. check: raises if parameters are of different steps."""

    def __init__(self, model: LocalModel, checks: CheckHooks, check: Callable[[], None]) -> None:
        self._model, self._checks, self._check = model, checks, check

    def loss(self, batch: Any, choices: Any, *, local: bool, gather: bool) -> Any:
        interpreter, _, loss, beside = self._run(batch, choices, local=local)
        return outputs.result(interpreter.program, self._model.mesh, loss, beside, gather=gather)

    def score(self, batch: Any, choices: Any, *, local: bool, gather: bool) -> Tensor:
        interpreter, _, _, values = self._run(batch, choices, local=local, use="score")
        named = outputs.result(interpreter.program, self._model.mesh, None, values, gather=gather)
        score: Tensor = named[SCORE]
        return score

    def scores(self, batches: Iterable[Any], *, local: bool, each: Callable[[Tensor], None] | None) -> dict[str, float]:
        means = Means()
        for batch in _some("engine.score_all", batches):
            interpreter, _, _, values = self._run(batch, local=local, use="score")
            means.add(interpreter.program, None, values, 1, {})
            if each is not None:
                each(outputs.result(interpreter.program, self._model.mesh, None, values, gather=True)[SCORE])
        mean = means.values()[MEAN_SCORE]
        return {"tokens": means.counted(MEAN_SCORE), "logprob": mean, "perplexity": math.exp(-mean)}

    def losses(self, batches: Iterable[Any], *, local: bool) -> dict[str, float]:
        means = Means()
        divisors: dict[int, MeanDivisors] = {}
        for batch in _some("engine.evaluate_all", batches):
            interpreter, values, loss, beside = self._run(batch, local=local)
            program = interpreter.program
            if id(program) not in divisors:
                divisors[id(program)] = MeanDivisors(program)
            divided_by = divisors[id(program)].of(self._model.mesh, values)
            means.add(program, loss, beside, inputs.rows(program), divided_by)
        if "loss" in means.undivided:
            self._model.mesh.note(NO_DIVISOR)
        elif any(LOSS in d.several for d in divisors.values()):
            self._model.mesh.note(SEVERAL_DIVISORS)
        if "loss" in (of_all := means.values()) and not means.counted("loss"):
            self._model.mesh.note(f"the loss of these batches is nan: {NOTHING}")
        return of_all

    @torch.no_grad()
    def _run(
        self, batch: Any, choices: Any = None, *, local: bool, use: batch_sizes.Use = "evaluate"
    ) -> tuple[Interpreter, Values, Tensor | None, outputs.Values]:
        self._check()
        self._checks.forward("engine.evaluate", training=False)
        self._model.buckets.reset(forward=True)
        self._model.rng.training = False
        interpreter, values = self._model.take(batch, self._checks, local=local, use=use, choices=choices)
        interpreter.compute_totals(values)
        return interpreter, values, *interpreter.evaluate(values)

    def generate(self, prompts: Any, options: Any) -> list[list[int]]:
        self._check()
        prompts = needed("generation", "runtime", "Prompts").of(prompts)
        self._checks.forward("engine.generate", training=False)
        self._model.gather_written()
        fact = stated("what is generated", (prompts, options), fix="use the same prompts and options on all ranks")
        self._checks.call("generating", fact, steps=True)
        self._model.rng.training = False
        tokens: list[list[int]] = self._generator(prompts, options)
        return tokens

    @cached_property
    def _generator(self) -> Any:
        model = self._model

        def stored() -> dict[str, Any]:
            model.buckets.reset(forward=True)
            return model.stored()

        return needed("generation", "runtime", "Generator")(model.program, model.mesh, stored, model.mesh.note)


def _some(call: str, batches: Any) -> Iterator[Any]:
    """Yield the batches. Raises NoBatchesError for none, ShardcError if the object is not iterable."""
    if batches is None:
        raise NoBatchesError(call, None)
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        fix = f"{call}([batch]), or a DataLoader"
        raise ShardcError(f"{batches!r} is not an iterable of batches", where=call, fix=fix)
    none = True
    for batch in batches:
        none = False
        yield batch
    if none:
        raise NoBatchesError(call, batches)
