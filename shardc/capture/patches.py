"""Patch torch around torch.export, and refuse models that cannot be exported.

Refused are hooks that export would drop silently, and models already wrapped or sharded for several devices. Patches
are context managers, undone when the capture ends, also when it fails.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardc.capture.refusals import PACKED, PADDED
from shardc.capture.rewrite import autograd_function
from shardc.errors import Errors, ShardcError
from shardc.ir import source
from shardc.runtime.state.quantized import is_composite
from shardc.torch_modes import untraced
from shardc.torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_mode,
    fake_tensor,
    plain_checkpoints,
    plain_indexing,
    replaced_packing,
)

#: Paths of torch's frames, and of its decorators.
_TORCH, _DECORATED = str(Path(torch.__file__).parent), inspect.getfile(torch.no_grad.__call__)


def check_hooks(model: nn.Module) -> None:
    """Refuse, all at once, backward hooks, torch.jit modules, parameters without a shape, and max_norm."""
    errors = Errors()
    compiled = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    for name in compiled:
        if name.rpartition(".")[0] not in compiled or not name:  # the outermost: modules inside are compiled too
            fault = "the module is scripted or traced by torch.jit, which is not captured"
            errors.add(fault, where=name or "the model", fix="pass the nn.Module that was scripted or traced")
    errors.raise_any()
    for name, module in model.named_modules():
        if hooks := [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]:
            fault = "the module has a backward hook, which a captured graph cannot keep"
            fix = "remove the hook, or compute what it does in forward"
            errors.add(fault, where=_name_with_line(name or type(module).__name__, hooks), fix=fix)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            errors.add(
                "max_norm writes to the weight in forward, which a program does not",
                where=name or type(module).__name__,
                fix=(
                    "leave max_norm out, and write to the weight before each step, on every rank: with torch.no_grad():"
                    f" torch.embedding_renorm_(engine.params[{f'{name}.weight'.lstrip('.')!r}], ids,"
                    f" {module.max_norm}, {module.norm_type}), with the ids of the whole batch; each rank has to have"
                    " the whole weight (leave it out of `shard`, and data.zero: 0)"
                ),
            )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.layout != torch.strided or x.is_nested:
            errors.add("a sparse or nested tensor cannot be split", where=name, fix="make it dense: x.to_dense()")
    for name, p in model.named_parameters():
        tables = p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)
        if hooks := [hook for table in tables if table for hook in table.values()]:
            fault = "the parameter has a gradient hook, which a captured graph cannot keep"
            fix = "remove the hook; gradient clipping and the like belong to the optimizer step"
            errors.add(fault, where=_name_with_line(name, hooks), fix=fix)
        if isinstance(p, nn.parameter.UninitializedParameter):
            fault = "the parameter of a lazy module has no shape yet"
            errors.add(fault, where=name, fix="run the model once on a batch before compiling it")
    errors.raise_any()


def check_wrapped(model: nn.Module) -> None:
    """Raise ShardcError if a part of the model is wrapped or sharded for several devices (DDP, DTensor)."""
    if hasattr(model, "full_state_dict") and hasattr(model, "clip_grad_norm_"):  # made by program.module
        fault = "the module is already compiled and has only this rank's part"
        fix = "pass the plain model, which it was compiled from"
        raise ShardcError(fault, where="the model", fix=fix)
    for name, module in model.named_modules():
        where = name or "the model"
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            fault = f"it is wrapped in {type(module).__name__}, which splits the batch and sums gradients itself"
            path = f"{name}.module" if name else "model.module"
            fix = f"pass the wrapped {path}: `mesh: {{dp: ...}}` of the spec does that"
            raise ShardcError(fault, where=where, fix=fix)
        if kind := _sharded_by_fsdp(module):
            fault = f"{kind} has already sharded its parameters over the ranks"
            fix = "pass the model before that call; `data: {zero: 3}` of the spec shards parameters in the same way"
            raise ShardcError(fault, where=where, fix=fix)
    tensor = sys.modules.get("torch.distributed.tensor")
    cut = [name for name, p in model.named_parameters() if tensor and isinstance(p, tensor.DTensor)]
    if cut:
        more = f" ({len(cut)} such)" if len(cut) > 1 else ""
        fault = f"the parameter is a DTensor: it is already sharded over the ranks{more}"
        fix = "pass the model before it was sharded, and write its plan as `shard:`"
        raise ShardcError(fault, where=cut[0], fix=fix)


def _sharded_by_fsdp(module: nn.Module) -> str:
    """Return which function of FSDP sharded a module. It is then imported; importing it here would slow every start."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, text in (("FSDPModule", "fully_shard"), ("FullyShardedDataParallel", "FullyShardedDataParallel")):
        if (kind := getattr(fsdp, name, None)) is not None and isinstance(module, kind):
            return text
    return ""


def _name_with_line(name: str, hooks: list[Callable[..., Any]]) -> str:
    """Return a name with the line at which the first of its hooks is defined: "fc.weight (model.py:12)"."""
    line = source.of_function(hooks[0]).line
    return f"{name} ({line})" if line else name


@contextmanager
def export_patches(side: list[autograd_function.SideTerm]) -> Iterator[None]:
    """Patch torch for export inside the block. side: receives loss terms that only have a gradient.

    Custom autograd Functions keep their backward (autograd_function.py), checkpoints run plainly, tensor hooks raise,
    `x.data` is `x.detach()`, and fake tensors can be formatted.
    """
    original: Any = inspect.getattr_static(torch.autograd.Function, "apply")  # a class method, of Python or of C

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            function, _preserve_rng_state, *operands = args
            return function(*operands)  # recomputation changes no result; its own Function would cut the gradients
        if cls.__module__.partition(".")[0] in ("torch", "shardc"):
            return original.__get__(None, cls)(*args, **kwargs)
        return autograd_function.kept(cls, args, side, untraced)

    def hook(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        fix = "remove register_hook; a custom gradient can be written as x + (y - x).detach()"
        raise source.of_call().error("a tensor hook is registered in forward, which a captured graph cannot keep", fix)

    def seed(number: int) -> Any:
        if not source.is_models(sys._getframe(1).f_code.co_filename):
            return seeded(number)
        fix = "draw them once in __init__, into a buffer: self.register_buffer('noise', torch.randn(...))"
        raise source.of_call().error("forward seeds torch's random numbers, which a program does not draw", fix)

    def packed(original: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return original(x, *args)
        raise source.of_call().error(PACKED, PADDED)  # not at the place where the recurrent layer fails later

    def switch(self: Tensor, requires_grad: bool = True) -> Tensor:
        if isinstance(self, FakeTensor) and not requires_grad and self.requires_grad and self.is_leaf:
            raise source.of_call().error(
                "the forward pass turns a parameter's gradient off, which tracing does not see",
                "run the module with detached weights: "
                "torch.func.functional_call(m, {n: p.detach() for n, p in m.named_parameters()}, x)",
            )
        return grad(self, requires_grad)

    def moved(self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Skip a move in forward, such as `self.router.to(dtype)`, if nothing would change."""
        tensors = (*self.parameters(recurse), *self.buffers(recurse))
        unchanged = all(change(x) is x for x in tensors)
        return self if unchanged else put(self, change, recurse)  # type: ignore[no-untyped-call]

    def without_gradients(self: torch.no_grad) -> None:
        caller: Any = sys._getframe(1)
        if caller.f_code.co_filename == _DECORATED:
            caller = caller.f_back
        by_user = not caller.f_code.co_filename.startswith(_TORCH)
        if by_user and torch.is_grad_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            fix = "let it begin outside: `with torch.no_grad(), torch.autocast(...):`; or detach the result"
            raise source.of_call().error("no_grad begins inside an autocast region, where torch.export loses it", fix)
        enter(self)

    def inference(self: Any) -> None:
        """Turn gradients off, which inference mode also does: tracing does not see the mode."""
        self._inference_mode_context = torch.no_grad() if self.mode else torch.enable_grad()
        self._inference_mode_context.__enter__()

    grad, put, enter, seeded = Tensor.requires_grad_, nn.Module._apply, torch.no_grad.__enter__, torch.manual_seed
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.no_grad, "__enter__", without_gradients))
        stack.enter_context(mock.patch.object(torch.inference_mode, "__enter__", inference))
        for norm in (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm):
            stack.enter_context(mock.patch.object(norm, "forward", _counting(norm.forward)))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", moved))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(replaced_packing(packed))
        stack.enter_context(plain_checkpoints())
        stack.enter_context(plain_indexing())
        stack.enter_context(mock.patch.object(Tensor, "requires_grad_", switch))
        # distributions check the values of their arguments, on which a captured graph cannot branch; eager runs still
        # do
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(mock.patch.object(torch, "manual_seed", seed))
        stack.enter_context(mock.patch.object(Tensor, "register_hook", hook))
        stack.enter_context(mock.patch.object(Tensor, "register_post_accumulate_grad_hook", hook))
        stack.enter_context(mock.patch.object(Tensor, "data", property(_data, _set_data)))
        stack.enter_context(mock.patch.object(Tensor, "__format__", _format))
        stack.enter_context(mock.patch.object(Tensor, "random_", _random))
        stack.enter_context(mock.patch.object(Tensor, "to", _to))
        yield


def _counting(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep a BatchNorm's step count a tensor if momentum=None: its statistics are means over all steps."""

    def counting(self: Any, x: Tensor) -> Tensor:
        if self.momentum is not None or not (self.training and self.track_running_stats):
            return forward(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for old, new in ((self.running_mean, mean), (self.running_var, var)):
            old.lerp_(new, self.num_batches_tracked.to(new.dtype).reciprocal())
        return y

    return counting


@contextmanager
def replaced_tensors(model: nn.Module, tensors: dict[int, Tensor]) -> Iterator[None]:
    """Replace the model's parameters and buffers in the block: {id of the original: new}. Ties stay ties."""
    saved: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for holder in holders:
                for name, x in list(holder.items()):
                    if x is not None and id(x) in tensors:
                        saved.append((holder, name, x))
                        holder[name] = tensors[id(x)]
        yield
    finally:
        for holder, name, x in saved:
            holder[name] = x


@contextmanager
def faked(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Make the model's parameters and buffers fake tensors inside the block; yield their mode."""
    mode = fake_mode()
    with replaced_tensors(model, {id(x): fake_tensor(mode, x) for x in (*model.parameters(), *model.buffers())}):
        yield mode


# --- methods of Tensor that tracing cannot follow ---------------------------------------------------------------------


_DATA = Tensor.data
_FORMAT: Any = Tensor.__format__
_RANDOM, _TO = Tensor.random_, Tensor.to


def _by_user(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) and source.is_models(sys._getframe(2).f_code.co_filename)


def _data(self: Tensor) -> Tensor:
    return self.detach() if _by_user(self) else _DATA.__get__(self)  # type: ignore[attr-defined]


def _set_data(self: Tensor, value: Tensor) -> None:
    if _by_user(self):
        fix = "change a buffer in place (self.x.copy_(new)); change parameters outside of forward"
        raise source.of_call().error("the forward pass replaces a tensor's .data", fix)
    _DATA.__set__(self, value)  # type: ignore[attr-defined]


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Move a tensor; torch aborts the process if a traced one is moved to a device that is not there."""
    target = next((a for a in (*args[:1], kwargs.get("device")) if isinstance(a, (str, int, torch.device))), None)
    if isinstance(self, FakeTensor) and target is not None and not isinstance(target, bool):
        device = torch.device(target)
        if device.type not in (self.device.type, "cpu", "meta") and not torch.get_device_module(device).is_available():
            raise RuntimeError(f"Invalid device {device}: not linked with support for it")  # as .cuda() does
    if is_composite(self):  # torch would pass this patch to the tensor's own method, which knows only torch's
        cls: Any = type(self)
        result: Tensor = cls.__torch_function__(_TO, (type(self),), (self, *args), kwargs)
        return result
    return _TO(self, *args, **kwargs)


def _format(self: Tensor, spec: str) -> str:
    """Format a traced tensor, which has no number to show: f"{loss:.3f}" in a message."""
    text: str = repr(self) if isinstance(self, FakeTensor) else _FORMAT(self, spec)
    return text


def _random(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run `random_(low, high)` as randint: the overload that torch traces has an argument named "from"."""
    limits = (*args, *(kwargs[k] for k in ("from", "to") if k in kwargs))
    if isinstance(self, FakeTensor) and limits and set(kwargs) <= {"from", "to"}:
        low, high = limits if len(limits) == 2 else (0, limits[0])
        return self.copy_(torch.randint(low, high, self.shape, dtype=self.dtype, device=self.device))
    return _RANDOM(self, *args, **kwargs)
