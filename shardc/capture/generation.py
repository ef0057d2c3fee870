"""A model as it generates (shardc.ir.generation): it is given a cache as transformers' models take one, so that it
decides itself what of each layer is kept, and masks its attention by it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.batch_leaves import Leaves
from shardc.capture.generation_cache import Now, apart, begun, together, unchanged
from shardc.capture.loss import ValuesOf, tensors_in
from shardc.errors import ShardcError
from shardc.ir.generation import AT, IDS, LOGITS, PLACE, Decode, Prefill, State, Step, Whole
from shardc.ir.source import of_function
from shardc.torch_private import traced_node


class GenerationOf(ValuesOf):
    """A model whose batch and whose values are those of a step that generates.

    The cache of a decoding step is buffers of this module, which forward writes to.
    """

    def __init__(self, model: nn.Module, leaves: Leaves, step: Step) -> None:
        super().__init__(model, leaves, True)
        self.step = step
        for s in step.states if isinstance(step, Decode) else ():
            self.register_buffer(s.buffer, torch.empty(s.shape, dtype=s.dtype, device="meta"))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = dict(self.leaves.batch(tensors))
        if isinstance(self.step, Whole):
            values = self._whole(batch[IDS], batch[AT])
        elif isinstance(self.step, Prefill):
            values = self._prefill(batch, self.step)
        else:
            values = self._decode(batch, self.step)
        return tuple(self._flat(values, ""))

    def _prefill(self, batch: dict[str, Any], step: Prefill) -> dict[str, Tensor]:
        cache = begun(self.model, Now(step.length, batch["attention_mask"] == 0, moves=step.moves))
        values = {LOGITS: self._logits(batch, cache)[:, -1]}
        states, form = apart(cache)
        step.form.cache, step.form.slots = form.cache, form.slots
        return values | {State(path, tuple(x.shape), x.dtype).output: x for path, x in states.items()}

    def _decode(self, batch: dict[str, Any], step: Decode) -> dict[str, Tensor]:
        place, held = batch.pop(PLACE, None), {s.path: getattr(self, s.buffer) for s in step.states}
        cache = together(step.form, held, Now(batch["attention_mask"].shape[1], place=place))
        if all(cache.is_linear):  # padding is behind, and a recurrence takes a mask of what is given now
            batch.pop("attention_mask")
        logits, after = self._logits(batch, cache), unchanged(step.form, cache)
        for path, buffer in held.items():
            if after[path].shape != buffer.shape or after[path].dtype != buffer.dtype:
                sizes = f"from {list(buffer.shape)} to {list(after[path].shape)}"
                raise ShardcError(f"{path!r} of its cache grows with a token, {sizes}", where="generate")
            if after[path] is not buffer:
                buffer.copy_(after[path])
        return {LOGITS: logits[:, -1]}

    def _logits(self, batch: dict[str, Any], cache: Any) -> Tensor:
        """[rows, positions, vocabulary]. Only the last position needs them, if the model can leave out others."""
        parameters = inspect.signature(self.model.forward).parameters
        given = {name: x for name, x in batch.items() if name in parameters}
        given |= {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        logits: Tensor = self.model(**given, **{_cache_argument(self.model): cache}, use_cache=True).logits
        return logits

    def _whole(self, ids: Tensor, at: Tensor) -> dict[str, Tensor]:
        output, (rows, length) = self.model(ids), ids.shape
        found = [x for x in tensors_in(output).values() if x.dim() == 3 and x.shape[:2] == (rows, length)]
        if not found:
            what = f"of ids [{rows}, {length}] the model gives no logits [{rows}, {length}, vocabulary]"
            fix = 'return logits of every position, as a tensor, .logits or "logits"'
            raise ShardcError(what, where=of_function(self.model.forward).line, fix=fix)
        logits = found[0]
        return {LOGITS: logits.gather(1, at[:, None, None].expand(rows, 1, logits.shape[-1]))[:, 0]}


def caches(module: nn.Module) -> dict[str, Tensor]:
    """The cache among the buffers of what is exported, by name; of other modules none."""
    return dict(module.named_buffers(recurse=False)) if isinstance(module, GenerationOf) else {}


def no_cache(model: nn.Module) -> str:
    """Why a model takes no cache of this kind; "" if it may."""
    if getattr(model, "config", None) is None or not _cache_argument(model):
        return f"{type(model).__name__} takes no cache of keys and values, as transformers' models do"
    return ""


def _cache_argument(model: nn.Module) -> str:
    """What forward calls it: transformers renames it in 5.24, model by model; "" if it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), "")
