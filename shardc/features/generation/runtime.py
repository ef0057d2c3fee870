"""Run the loop over tokens: prompts through one program, then token by token through another.

    prompts, padded on their left        first   logits, cache
    the tokens chosen of these           next    logits; the cache has theirs       as often as tokens are requested

The cache is written in place. For a model without cache, each token takes a forward of the whole sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.generation.program import AT, ENCODER, IDS, LOGITS, MASK, PLACE, Begins, Sizes, State
from shardc.features.generation.prompts import Prompts
from shardc.features.generation.sampling import Options, Sampler
from shardc.ir.outputs import Output
from shardc.ir.program import Program, Resize
from shardc.ir.stored import Input
from shardc.optional import needed
from shardc.runtime.data import inputs
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.stage.communicators import groups_of
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.state.parts import constants

T = TypeVar("T")
#: Lengths of prompts and of caches are multiples of these, as each new length is compiled.
PROMPTS, CACHES = 16, 64
#: The first tokens of a vocabulary are often special (padding, ends, parts); positions of some models skip padding.
SPECIAL = 8
#: The largest difference of logits with a cache, relative to the largest logit, by rounding: parts of many models
#: round to 32 bits in every dtype (norms, gates of a recurrence). 5e-2: in 16 bits.
AGREE = {torch.float64: 2e-5, torch.float32: 1e-3}


@dataclass(frozen=True)
class _Runs:
    """A program with its interpreter and constants."""

    program: Program
    interpreter: Interpreter
    constants: Mapping[str, Tensor]

    @classmethod
    def of(cls, program: Program, mesh: Any) -> _Runs:
        runs = cls(program, Interpreter(program, mesh), constants(program, mesh))
        if isinstance(mesh, TorchMesh):
            mesh.add_groups([*groups_of(program), runs.split_axes])
        return runs

    @property
    def logits(self) -> Output:
        return next(o for o in self.program.outputs if o.name == LOGITS)

    @property
    def places(self) -> bool:
        """Whether each token has its own place in the cache; else it has the last one."""
        return any(x.path == (PLACE,) for x in self.program.inputs)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes over which ranks choose tokens of different rows, or of none."""
        split = [a for a, _ in self.logits.layout.shards(0)]
        stages = [self.program.axis] if self.program.axis else []
        return tuple(a for a in (*split, *stages) if self.program.mesh.size(a) > 1)


@dataclass(frozen=True)
class _Call:
    """The request. prompts: for an encoder-decoder, the start of the decoder; encoder: its inputs."""

    prompts: Prompts
    encoder: dict[str, Tensor]
    sizes: Sizes
    options: Options

    def batch(self, prompts: Prompts, length: int) -> dict[str, Any]:
        """Return the batch of a forward of prompts of this length."""
        ids, mask = prompts.left_padded(self.sizes.rows, length)
        batch = {"input_ids": ids, MASK: mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        return {**batch, ENCODER: self.encoder} if self.encoder else batch


class Generator:
    """Generates with an engine's weights. stored: returns current parameters; note: prints on rank 0."""

    def __init__(
        self, program: Program, mesh: Any, stored: Callable[[], dict[str, Any]], note: Callable[[str], None]
    ) -> None:
        self.program, self.mesh, self.stored, self.note = program, mesh, stored, note
        #: Both programs, or None for a model without cache; and the programs of whole sequences.
        self._steps: dict[Sizes, tuple[_Runs, _Runs] | None] = {}
        self._wholes: dict[Sizes, _Runs] = {}

    @torch.no_grad()
    def __call__(self, prompts: Prompts, options: Options) -> list[list[int]]:
        """Return the new tokens of each prompt, on every rank. Collective."""
        begins = self._compile_on_all(_compiler("begins"))
        call = self._call(prompts, options if options.stop is not None else replace(options, stop=begins.stop), begins)
        sizes = call.sizes
        if sizes not in self._steps:
            with self._note_seconds(f"{sizes.rows} prompts of {sizes.prompt} tokens, {sizes.length} in all"):
                self._steps[sizes] = self._compiled(call)
        steps = self._steps[sizes]
        if steps is not None:
            return _until_stop(self._cached(*steps, call), call)
        whole = replace(sizes, prompt=0, length=call.prompts.longest + options.tokens - 1)
        if whole not in self._wholes:
            with self._note_seconds(f"{whole.rows} sequences of {whole.length} tokens"):
                self._wholes[whole] = self._runs(self._compile_on_all(_compiler("whole", self.program, whole)))
        return _until_stop(self._whole(self._wholes[whole], call, whole.length), call)

    def _call(self, prompts: Prompts, options: Options, begins: Begins) -> _Call:
        spec = self.program.spec
        products = getattr(spec.precision, "products", None)
        if products is not None and not products.by_rows:
            fault = (
                f"products: {products.recipe} has one scale for all tokens that are computed at once: the result of a "
                "prompt would depend on the other prompts, and on how many of its tokens are in the cache"
            )
            fix = "compile with fp8-rowwise or mxfp8 to generate"
            raise ShardcError(fault, where=spec.where(("precision", "products")), fix=fix)
        ranks = spec.data_ranks
        rows = -(-len(prompts.ids) // ranks) * ranks
        encoder: dict[str, Tensor] = {}
        if begins.encodes:
            encoder, prompts = prompts.for_encoder(rows, PROMPTS), prompts.for_decoder(begins.start)
            prompt = prompts.longest
        elif prompts.inputs or prompts.decoder:
            names = ", ".join(name for name, _ in prompts.inputs) or "decoder_input_ids"
            fault = f"{self.program.meta.get('model')} has no encoder, which {names} would be for"
            raise ShardcError(fault, where="generate", fix="pass lists of token ids")
        else:
            prompt = -(-prompts.longest // PROMPTS) * PROMPTS
        length = -(-(prompt + options.tokens) // CACHES) * CACHES
        forms = tuple((name, tuple(x.shape), x.dtype) for name, x in encoder.items())
        return _Call(prompts, encoder, Sizes(rows, prompt, length, forms), options)

    @contextmanager
    def _note_seconds(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.note(f"compiled for {what}, in {time.perf_counter() - start:.1f} s")

    def _compiled(self, call: _Call) -> tuple[_Runs, _Runs] | None:
        why = ""
        for moves in (False,) if call.encoder else (False, True):  # a decoder has no mask for later tokens
            sizes = replace(call.sizes, moves=moves)
            result = self._compile_on_all(_compiler("generating", self.program, sizes))
            if result.steps is not None:
                first, following = map(self._runs, result.steps)
                longer = self._runs(result.trial) if result.trial is not None else first
                if self._agree(longer, first, following, call):
                    return first, following
            why = why or result.why or f"with a cache {self.program.meta.get('model')} has other logits than without"
        self.note(f"{why}: each token takes a forward of the whole sequence")
        return None

    def _runs(self, program: Program) -> _Runs:
        return _Runs.of(program, self.mesh)

    def _compile_on_all(self, make: Callable[[Resize], T]) -> T:
        """Compile the same on all ranks. Raises ShardcError, on all, if one of them cannot."""
        if self.program.resize is None:
            fault = "generating compiles more programs, but a loaded program has no model to compile"
            raise ShardcError(fault, where="generate", fix="compile in this process (shardc.compile)")
        self.mesh.barrier()  # for ranks that are threads of one process: none runs during a compilation
        result, error = None, None
        try:
            result = make(self.program.resize)
        except ShardcError as e:
            error = e
        if self.mesh.sum_on_host([error is not None])[0]:  # the model may exist on some ranks only
            raise error or ShardcError("another rank could not compile the program that generates", where="generate")
        assert result is not None
        self.mesh.barrier()
        return result

    def _agree(self, longer: _Runs, first: _Runs, following: _Runs, call: _Call) -> bool:
        """Test once, on artificial ids, whether a token's logits are the same with and without the cache.

        A model may count places itself, or treat its cache in a special way: the test shows that.
        """
        rows, prompt, length = call.sizes.rows, call.sizes.prompt, call.sizes.length
        width = prompt if longer is first else prompt + 1
        tokens = first.logits.shape[1]
        least = min(SPECIAL, tokens // 2)
        ids = least + (torch.arange(rows * width).reshape(rows, width) * 7919) % (tokens - least)
        some = Prompts(tuple(map(tuple, ids.tolist())))
        _, expected = longer.interpreter.forward(self._stage_inputs(longer, call.batch(some, width)))
        batch = call.batch(Prompts(tuple(row[:-1] for row in some.ids)), prompt)
        _, outputs = first.interpreter.forward(self._stage_inputs(first, batch))
        arguments = self._next_inputs(following, batch, length) | self._part_of(following, ids[:, -1], batch, 0, length)
        _, cached = following.interpreter.forward({**arguments, **_cache(outputs)})
        differ = False
        if LOGITS in expected:
            one, other = expected[LOGITS].double(), cached[LOGITS].double()
            slack = AGREE.get(_narrowest(longer.program, expected[LOGITS]), 5e-2) * float(one.abs().max())
            differ = not torch.allclose(one, other, rtol=0, atol=slack)
        return not self.mesh.sum_on_host([differ])[0]

    def _cached(self, first: _Runs, following: _Runs, call: _Call) -> Iterator[list[int]]:
        """Yield the tokens of every row, step by step."""
        length, options = call.sizes.length, call.options
        batch = call.batch(call.prompts, call.sizes.prompt)
        _, outputs = first.interpreter.forward(self._stage_inputs(first, batch))
        cache = _cache(outputs)
        tokens = self._token_of_rows(first, Sampler.of(first.logits, self.mesh, options), outputs, 0)
        yield tokens.tolist()
        sample, taken = Sampler.of(following.logits, self.mesh, options), self._next_inputs(following, batch, length)
        for step in range(1, options.tokens):
            step_inputs = self._part_of(following, tokens, batch, step - 1, length)
            news, outputs = following.interpreter.forward({**taken, **self.stored(), **cache, **step_inputs})
            cache |= news
            tokens = self._token_of_rows(following, sample, outputs, step)
            yield tokens.tolist()

    def _next_inputs(self, following: _Runs, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Return the inputs of steps after prompts: those that are the same in all, and room for the rest."""
        now: dict[str, Any] = _step(batch, batch["input_ids"][:, -1], 0, length, following.places)
        if MASK in batch.get(ENCODER, {}):
            now[ENCODER] = {MASK: batch[ENCODER][MASK]}
        return self._stage_inputs(following, now)

    def _part_of(
        self, following: _Runs, tokens: Tensor, batch: Mapping[str, Any], step: int, length: int
    ) -> dict[str, Tensor]:
        """Return this rank's part of the inputs that change from step to step."""
        now = _step(batch, tokens, step, length, following.places)
        if following.places:
            del now[MASK]
        named = {x.path: x for x in following.program.inputs}
        return {named[name,].name: self._local(named[name,], x) for name, x in now.items()}

    def _whole(self, runs: _Runs, call: _Call, length: int) -> Iterator[list[int]]:
        """Yield the same, where each step is a forward of whole sequences."""
        rows, options = call.sizes.rows, call.options
        ids, lengths = call.prompts.right_padded(rows, length)
        beside = {ENCODER: call.encoder} if call.encoder else {}
        sample = Sampler.of(runs.logits, self.mesh, options)
        every = torch.arange(rows)
        for step in range(options.tokens):
            at = lengths - 1 + step
            _, outputs = runs.interpreter.forward(self._stage_inputs(runs, {IDS: ids, AT: at, **beside}))
            if not step:
                self._check_causal(runs, ids, at, beside, outputs)
            tokens = self._token_of_rows(runs, sample, outputs, step)
            if step + 1 < options.tokens:
                ids[every, at + 1] = tokens
            yield tokens.tolist()

    def _check_causal(
        self, runs: _Runs, ids: Tensor, at: Tensor, beside: dict[str, Any], made: Mapping[str, Tensor]
    ) -> None:
        """Raise ShardcError, on all ranks, if the logits of a position depend on later tokens."""
        behind = torch.arange(ids.shape[1]) > at[:, None]
        batch = {IDS: ids.masked_fill(behind, 1), AT: at, **beside}
        _, other = runs.interpreter.forward(self._stage_inputs(runs, batch))
        differs = LOGITS in made and not torch.allclose(made[LOGITS], other[LOGITS], rtol=1e-2, atol=1e-3)
        if self.mesh.sum_on_host([differs])[0]:
            fault = "logits depend on later tokens: the model is not causal, and cannot generate"
            raise ShardcError(fault, where="generate", fix="give its attention a causal mask")

    def _stage_inputs(self, runs: _Runs, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a program's stages here, except those that steps write."""
        parts = inputs.take(runs.program, dict(batch), self.mesh, local=False)
        return {
            **self.stored(),
            **runs.constants,
            **dict(zip((x.name for x in runs.program.inputs), parts, strict=True)),
        }

    def _local(self, x: Input, whole: Tensor) -> Tensor:
        part = x.layout.local(whole, self.mesh.layout, self.mesh.layout.coords(self.mesh.rank))
        return part.contiguous().to(self.mesh.device)

    def _token_of_rows(self, runs: _Runs, sample: Sampler, made: Mapping[str, Tensor], step: int) -> Tensor:
        """Return the token of every row, i64[rows], on every rank. Ranks with a row's logits choose it."""
        chosen = sample(made[LOGITS], step) if LOGITS in made else None
        if not runs.split_axes:
            assert chosen is not None
            return chosen.cpu()
        tokens = torch.zeros(runs.logits.shape[0], dtype=torch.int64, device=self.mesh.device)
        if chosen is not None:
            tokens[sample.rows] = chosen
        return self.mesh.all_reduce(tokens, runs.split_axes, tag="tokens").cpu()  # type: ignore[no-any-return]


def _compiler(name: str, *arguments: Any) -> Callable[[Resize], Any]:
    """Return a function of `compiler`, for these arguments: a rank imports no compiler unless it generates."""
    return lambda resize: needed("generation", "compiler", name)(resize, *arguments)


def _narrowest(program: Program, logits: Tensor) -> torch.dtype:
    """Return the dtype of fewest bits of logits and weights: many models widen their logits to 32 bits."""
    dtypes = {logits.dtype, *(p.dtype for p in program.params if p.dtype.is_floating_point)}
    if program.spec.precision.compute:
        dtypes.add(getattr(torch, program.spec.precision.compute))
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def _step(batch: Mapping[str, Any], tokens: Tensor, step: int, length: int, places: bool) -> dict[str, Tensor]:
    """Return the inputs for one token of each row, `step` tokens after prompts, and a cache's length.

    places: a cache's first places are those of the prompt, and the mask is the same in all steps, as no token sees
    later
    ones; else the token has the last place.
    """
    mask = batch[MASK]
    rows, prompt = mask.shape
    now = {"input_ids": tokens[:, None], "position_ids": mask.sum(1, keepdim=True) + step}
    if places:
        whole = [mask, mask.new_ones(rows, length - prompt)]
        return {**now, MASK: torch.cat(whole, 1), PLACE: torch.tensor(prompt + step)}
    whole = [mask.new_zeros(rows, length - prompt - step - 1), mask, mask.new_ones(rows, step + 1)]
    return {**now, MASK: torch.cat(whole, 1)}


def _cache(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the cache that a forward of prompts has made, by the names of buffers."""
    states = ((State.of_output(name, tuple(x.shape), x.dtype), x) for name, x in made.items())
    return {s.buffer: x for s, x in states if s is not None}


def _until_stop(steps: Iterator[list[int]], call: _Call) -> list[list[int]]:
    """Return the tokens of each prompt up to its end, from the steps of all rows."""
    chosen: list[list[int]] = [[] for _ in call.prompts.ids]
    going = set(range(len(chosen)))
    for tokens in steps:
        for i in list(going):
            chosen[i].append(tokens[i])
            if tokens[i] in (call.options.stop or ()):
                going.discard(i)
        if not going:
            break
    return chosen
