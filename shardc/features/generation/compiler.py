"""Compile the programs by which a model generates (shardc.features.generation.program), once for each of the sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.features.generation.capture import Decode, Prefill, Whole, no_cache
from shardc.features.generation.program import AT, ENCODER, IDS, MASK, PLACE, Begins, Form, Generation, Sizes, State
from shardc.ir.program import Program
from shardc.recompile import Resizer, in_eval_mode

T = TypeVar("T")
_MADE: WeakKeyDictionary[Resizer, dict[Any, Any]] = WeakKeyDictionary()


def begins(resizer: Resizer) -> Begins:
    """Read how generation begins and ends from the model's config. Raises ShardcError without a model."""
    with resizer.lock:
        model = _alive(resizer)
        start = _of_config(model, "decoder_start_token_id")
        encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        return Begins(encodes, start[0] if start else None, _of_config(model, "eos_token_id"))


def generating(resizer: Resizer, program: Program, sizes: Sizes) -> Generation:
    """Compile how the model generates with a cache: no steps if it takes none, or cannot be captured with it.

    Raises ShardcError without a model.
    """
    return _once(resizer, sizes, lambda: _generating(resizer, program, sizes))


def whole(resizer: Resizer, program: Program, sizes: Sizes) -> Program:
    """Compile the program of whole sequences of this length."""
    batch: dict[str, Any] = {IDS: _some(sizes.rows, sizes.length), AT: _some(sizes.rows)}
    batch |= {ENCODER: _encoder(sizes)} if sizes.encoder else {}
    options: dict[str, Any] = {"forward": Whole(), "prove": False, "compatible_with": program}
    return _once(resizer, (sizes,), lambda: resizer.compile(_alive(resizer), batch, program.spec, **options))


def _once(resizer: Resizer, key: Any, make: Callable[[], T]) -> T:
    """Make it once. Threads take turns, as only one may capture at a time."""
    with resizer.lock:
        made = _MADE.setdefault(resizer, {})
        if key not in made:
            made[key] = make()
        result: T = made[key]
        return result


def _alive(resizer: Resizer) -> nn.Module:
    model = resizer.build()
    if model is None:
        fault = "generating runs separate programs, and the model that would have to be compiled no longer exists"
        fix = "keep the model that was compiled: `net = model(); program = shardc.compile(net, ...)`"
        raise ShardcError(fault, where="generate", fix=fix)
    return model


def _generating(resizer: Resizer, program: Program, sizes: Sizes) -> Generation:
    model = _alive(resizer)
    if why := no_cache(model):
        return Generation(None, why=why)
    try:
        with in_eval_mode(model):
            return _steps(resizer, program, model, sizes)
    except ShardcError as e:
        return Generation(None, why=f"{type(model).__name__} cannot be captured with a cache ({e.what})")


def _steps(resizer: Resizer, program: Program, model: nn.Module, sizes: Sizes) -> Generation:
    """Compile the programs of prompts and of one token.

    The graph of the first shows which tensors the cache has; the second decides how they are split.
    """
    encoder = _encoder(sizes)

    def batch(new: int, seen: int, **others: Any) -> dict[str, Any]:
        of_new = {"input_ids": _some(sizes.rows, new), "position_ids": _some(sizes.rows, new)}
        return {**of_new, "attention_mask": _some(sizes.rows, seen), **others}

    def prompts(length: int) -> dict[str, Any]:
        return batch(length, length, **({ENCODER: encoder} if encoder else {}))

    form = Form()
    captured = capture(model, prompts(sizes.prompt), forward=Prefill(sizes.length, form, sizes.moves))
    per_output = (State.of_output(o.name, o.shape, o.dtype) for o in captured.outputs)
    states = tuple(s for s in per_output if s is not None)
    if not states:
        raise ShardcError("it puts nothing into its cache", where="generate")
    make = functools.partial(resizer.compile, model, spec=program.spec, prove=False, compatible_with=program)
    others: dict[str, Any] = {} if sizes.moves else {PLACE: _some()}
    others |= {ENCODER: {MASK: encoder[MASK]}} if MASK in encoder else {}
    following = make(batch=batch(1, sizes.length, **others), forward=Decode(states, form))
    buffers = {b.name: b for b in following.buffers}
    layouts = {s.output: buffers[s.buffer].layout for s in states}
    step = Prefill(sizes.length, form, sizes.moves, layouts)
    first = make(batch=prompts(sizes.prompt), captured=captured, forward=step)
    outputs = {o.name: o for o in first.outputs}
    moved = [s for s in states if following.axis and outputs[s.output].stage not in buffers[s.buffer].stages]
    if moved:
        fault = f"what makes {moved[0].path!r} of its cache is cut otherwise for prompts than for tokens"
        fix = "name the modules that begin a stage: pipeline: {cut: [...]}"
        raise ShardcError(fault, where="generate", fix=fix)
    trial = None
    if encoder:
        trial = make(batch=prompts(sizes.prompt + 1), forward=Prefill(sizes.length, Form()))
    return Generation((first, following), trial)


def _some(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _encoder(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in sizes.encoder}


def _of_config(model: nn.Module, name: str) -> tuple[int, ...]:
    """Return the token ids under a name in the model's generation_config or config."""
    configs = (getattr(model, of, None) for of in ("generation_config", "config"))
    values = (getattr(c, name, None) for c in configs if c is not None)
    ids = next((x for x in values if x is not None), ())
    return (ids,) if isinstance(ids, int) else tuple(ids)
