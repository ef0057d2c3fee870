"""The loop over tokens of an engine: prompts through one program, then token by token through another, whose cache is
written where it stands.

    prompts, filled up on their left     first   logits, cache
    the tokens chosen of these           next    logits; the cache has theirs       as often as tokens are wanted

Of a model that keeps no cache, each token is a forward of all that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.generation import AT, IDS, LOGITS, PLACE, Generation, State
from shardc.ir.outputs import Output
from shardc.ir.program import Input, Program
from shardc.runtime import state
from shardc.runtime.generate.prompts import Options, Prompts
from shardc.runtime.generate.sampling import Sampler
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.step import inputs
from shardc.runtime.step.communicators import groups_of
from shardc.runtime.step.interpreter import Interpreter

#: Lengths of prompts and of caches are multiples of these: each new one is compiled for.
PROMPTS, CACHES = 16, 64


@dataclass(frozen=True)
class _Runs:
    """A program, what runs it, and its constants."""

    program: Program
    interpreter: Interpreter
    constants: Mapping[str, Tensor]

    @classmethod
    def of(cls, program: Program, mesh: Any) -> _Runs:
        runs = cls(program, Interpreter(program, mesh), state.constants(program, mesh))
        if isinstance(mesh, TorchMesh):
            mesh.add_groups([*groups_of(program), runs.apart])
        return runs

    @property
    def logits(self) -> Output:
        return next(o for o in self.program.outputs if o.name == LOGITS)

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes over which ranks choose tokens of different rows, or of none."""
        split = [a for a, _ in self.logits.layout.shards(0)]
        stages = [self.program.axis] if self.program.axis else []
        return tuple(a for a in (*split, *stages) if self.program.mesh.size(a) > 1)


class Generator:
    """What generates with the weights of one engine. stored: gives the parameters and buffers that a forward takes, of
    now; tell: says a line on the first rank.
    """

    def __init__(
        self, program: Program, mesh: Any, stored: Callable[[], dict[str, Any]], tell: Callable[[str], None]
    ) -> None:
        self.program, self.mesh, self.stored, self.tell = program, mesh, stored, tell
        self._runs: dict[tuple[int, int, int], tuple[Generation, _Runs, _Runs | None]] = {}

    @torch.no_grad()
    def __call__(self, prompts: Prompts, options: Options) -> list[list[int]]:
        """The new tokens of each prompt, on every rank. Collective."""
        spec = self.program.spec
        ranks = spec.data_ranks if spec is not None else 1
        rows = -(-len(prompts.ids) // ranks) * ranks
        prompt = -(-prompts.longest // PROMPTS) * PROMPTS
        length = -(-(prompt + options.tokens) // CACHES) * CACHES
        found, first, following = self._compiled(rows, prompt, length)
        options = options if options.stop is not None else replace(options, stop=found.stop)
        steps = (
            self._cached(first, following, prompts, rows, length, options)
            if following is not None
            else self._whole(first, prompts, rows, length, options)
        )
        chosen: list[list[int]] = [[] for _ in prompts.ids]
        going = set(range(len(chosen)))
        for tokens in steps:
            for i in list(going):
                chosen[i].append(token := tokens[i])
                if token in (options.stop or ()) or len(chosen[i]) == options.tokens:
                    going.discard(i)
            if not going:
                break
        return chosen

    def _compiled(self, rows: int, prompt: int, length: int) -> tuple[Generation, _Runs, _Runs | None]:
        key = rows, prompt, length
        if key not in self._runs:
            if self.program.resize is None:
                what = "generating runs programs of its own, and one that was loaded has no model to compile"
                raise ShardcError(what, where="generate", fix="compile in this process (shardc.compile)")
            self.mesh.barrier()  # ranks that are threads of one process: nobody runs meanwhile
            made, error = None, None
            try:
                made = self.program.resize.generating(self.program, rows, prompt, length)
            except ShardcError as e:
                error = e
            if self.mesh.sum_on_host([error is not None])[0]:  # the model may be alive on some ranks only
                raise error or ShardcError("another rank could not compile what generates", where="generate")
            assert made is not None
            self.mesh.barrier()
            following = _Runs.of(made.next, self.mesh) if made.next is not None else None
            self._runs[key] = made, _Runs.of(made.first, self.mesh), following
            if made.why:
                self.tell(f"{made.why}: each token takes a forward of the whole sequence")
        return self._runs[key]

    def _cached(
        self, first: _Runs, following: _Runs, prompts: Prompts, rows: int, length: int, options: Options
    ) -> Iterator[list[int]]:
        """The tokens of every row, step by step."""
        prompt = next(x.shape[1] for x in first.program.inputs)
        ids, mask = prompts.left_padded(rows, prompt)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        _, made = first.interpreter.forward(self._taken(first, batch))
        cache = {s.buffer: x for name, x in made.items() if (s := State.of_output(name, tuple(x.shape), x.dtype))}
        sample = Sampler.of(first.logits, self.mesh, options)
        tokens = self._shared(first, sample, made, 0)
        yield tokens.tolist()
        positions, mask = positions[:, -1:], torch.cat([mask, mask.new_ones(rows, length - prompt)], 1)
        place = torch.tensor(prompt)
        batch = {"input_ids": tokens[:, None], "attention_mask": mask, "position_ids": positions, PLACE: place}
        taken, sample = self._taken(following, batch), Sampler.of(following.logits, self.mesh, options)
        inputs_of = {str(x.path[0]): x for x in following.program.inputs}
        for step in range(1, options.tokens):
            now = {"input_ids": tokens[:, None], "position_ids": positions + step, PLACE: place + step - 1}
            here = {inputs_of[name].name: self._local(inputs_of[name], x) for name, x in now.items()}
            news, made = following.interpreter.forward({**taken, **self.stored(), **cache, **here})
            cache |= news
            tokens = self._shared(following, sample, made, step)
            yield tokens.tolist()

    def _whole(self, runs: _Runs, prompts: Prompts, rows: int, length: int, options: Options) -> Iterator[list[int]]:
        """The same, where each step is a forward of whole sequences."""
        ids, lengths = prompts.right_padded(rows, length)
        sample = Sampler.of(runs.logits, self.mesh, options)
        every = torch.arange(rows)
        for step in range(options.tokens):
            at = lengths - 1 + step
            _, made = runs.interpreter.forward(self._taken(runs, {IDS: ids, AT: at}))
            if not step:
                self._check_causal(runs, ids, at, made)
            tokens = self._shared(runs, sample, made, step)
            ids[every, at + 1] = tokens
            yield tokens.tolist()

    def _check_causal(self, runs: _Runs, ids: Tensor, at: Tensor, made: Mapping[str, Tensor]) -> None:
        """Raises ShardcError, on all ranks, where what stands behind a position changes its logits."""
        behind = torch.arange(ids.shape[1]) > at[:, None]
        _, other = runs.interpreter.forward(self._taken(runs, {IDS: ids.masked_fill(behind, 1), AT: at}))
        differs = LOGITS in made and not torch.allclose(made[LOGITS], other[LOGITS], rtol=1e-2, atol=1e-3)
        if self.mesh.sum_on_host([differs])[0]:
            what = "logits depend on the tokens behind them: the model is not causal, and cannot generate"
            raise ShardcError(what, where="generate", fix="give its attention a causal mask")

    def _taken(self, runs: _Runs, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the stages of a program take here, but for what is written to."""
        parts = inputs.take(runs.program, dict(batch), self.mesh, local=False)
        return {
            **self.stored(),
            **runs.constants,
            **dict(zip((x.name for x in runs.program.inputs), parts, strict=True)),
        }

    def _local(self, x: Input, whole: Tensor) -> Tensor:
        mine = x.layout.local(whole, self.mesh.layout, self.mesh.layout.coords(self.mesh.rank))
        return mine.contiguous().to(self.mesh.device)

    def _shared(self, runs: _Runs, sample: Sampler, made: Mapping[str, Tensor], step: int) -> Tensor:
        """i64[rows]: the token of every row, on every rank: the ranks that have a row's logits choose it."""
        chosen = sample(made[LOGITS], step) if LOGITS in made else None
        if not runs.apart:
            assert chosen is not None
            return chosen.cpu()
        tokens = torch.zeros(runs.logits.shape[0], dtype=torch.int64, device=self.mesh.device)
        if chosen is not None:
            tokens[sample.rows] = chosen
        return self.mesh.all_reduce(tokens, runs.apart, tag="tokens").cpu()  # type: ignore[no-any-return]
