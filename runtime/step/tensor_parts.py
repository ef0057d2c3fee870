"""Tensors that know that they are a rank's part: a parameter that is split, its gradient, and what a loop of the
user's own makes of them. What mixes elements is not what it would be of the whole.

`torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)` takes the norm of what lies in `.grad`. Where that is this
rank's slice, every rank would clip by another number, and replicated weights would drift apart. So only that works
which is the same for a part as for the whole (shardc.runtime.step.part_functions); all else is an error with what to
call instead:

    p.square()             a part            p.norm(), p.square().mean(), p @ p.T     refused
    p.norm(dim=1)          a part, if the rank has all of dim 1
    p.square().sum()       a sum of parts: its gradient is right, its value this rank's

A sum of parts stays one in what is linear (a penalty times 0.1, added to the loss), and may be trained by; a note says
what it is where its number is read. Of a gradient, which trains nothing, a sum is refused.

DTensor goes the other way, and sends whatever an op needs: in a loop where only one rank prints, that waits for ever.

That holds for the user's code. shardc's own, and torch's optimizers (which are tried before they step:
shardc.runtime.zero.optimizer_check), take parts for the tensors that they are. Like DTensor, a parameter that is a part
is one of the classes for which torch's optimizers take their foreach and fused forms (shardc.torch_private).
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime.step.part_functions import Kind, kind
from shardc.torch_private import foreach_for

#: {the line: the note}, told once.
Tell = Callable[[Mapping[str, str]], None]
_SHAPES = frozenset(("shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "__len__"))
_DIMS = frozenset(("ndim", "dim", "ndimension"))
#: Of torch.nn.init, what fills a part with what it would fill the whole with.
_SAME_FILL = frozenset(("constant_", "ones_", "zeros_"))
#: What stands between the user's code and a function of torch's. (shardc writes plain tensors.)
_LIBRARIES = ("torch.", "safetensors.")
#: Functions of torch.distributed that write what is made of other ranks' tensors in the place of this rank's.
_MIXING = frozenset(("all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "reduce_scatter", "scatter"))
_PLAIN = ".as_subclass(torch.Tensor) is this rank's part as a plain tensor"


@dataclass(frozen=True, eq=False)
class Origin:
    """What a part is of: a parameter by name, with its whole shape, or its gradient; how to tell notes."""

    fqn: str = ""
    shape: tuple[int, ...] = ()
    grad: bool = True
    tell: Tell = lambda notes: None

    def __str__(self) -> str:
        return f"{self.fqn or 'a parameter'}{'.grad' if self.grad and self.fqn else 's .grad' * self.grad}"


class TensorPart(Tensor):
    """A part of a tensor. What writes to it, or from it into another tensor, gives back what was written to.

    .split_dims: the dims of which this rank has some only; None: nobody knows which; none: it has all of a parameter,
    for which it is not to draw random numbers alone."""

    split_dims: frozenset[int] | None = None
    origin: Origin = Origin()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or (caller := _Caller.here(sys._getframe(1))) is None:
            with plain():
                return func(*args, **kwargs)
        return _call(func, args, kwargs, caller)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return part(copy.deepcopy(self.as_subclass(Tensor), memo), self.split_dims, self.origin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)  # what a file has
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __create_write_items__(self, *_: Any) -> NoReturn:
        refuse_checkpoint_of(self.origin.fqn)

    __create_chunk_list__ = __create_write_items__


class SumOfParts(TensorPart):
    """A sum over the elements of parts, and what is linear in it."""


class ParameterPart(TensorPart, nn.Parameter):
    """A parameter of which this rank has a part: made from a plain one by `know`, which stays what it was."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        plain = self.detach().as_subclass(Tensor).clone(memory_format=torch.preserve_format)
        copied = memo[id(self)] = know(nn.Parameter(plain, self.requires_grad), self.split_dims, self.origin)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach().as_subclass(Tensor), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


foreach_for(ParameterPart)


def part(x: Tensor, dims: Collection[int] | None = None, origin: Origin = Origin()) -> Tensor:
    """A tensor as a part. Its memory stays its own."""
    made = x.as_subclass(TensorPart)
    made.split_dims, made.origin = frozenset(dims) if dims is not None else None, origin
    return made


def know(p: nn.Parameter, dims: Collection[int] | None, origin: Origin) -> nn.Parameter:
    """Let a parameter know that it is a part: the object, which modules, optimizers and autograd hold."""
    p.__class__ = ParameterPart
    assert isinstance(p, ParameterPart)
    p.split_dims, p.origin = frozenset(dims) if dims is not None else None, origin
    return p


def plain() -> AbstractContextManager[None]:
    """Within, parts are the tensors that they are, in this thread: where shardc's own code runs, which need not be
    looked at call by call.
    """
    return torch._C.DisableTorchFunctionSubclass()


_begun = threading.local()


def begin_plain() -> None:
    """The same until `end_plain`. Where that does not come (a step that fails), until the next forward or step."""
    end_plain()
    _begun.within = plain()
    _begun.within.__enter__()


def end_plain() -> None:
    if (within := getattr(_begun, "within", None)) is not None:
        _begun.within = None
        within.__exit__(None, None, None)


class _Caller:
    """User code that calls a function of torch. innermost: what called it: that, or code of torch's between; through:
    (module, function) of that, the innermost first.
    """

    def __init__(self, frame: FrameType, innermost: FrameType, through: list[tuple[str, str]]) -> None:
        self.frame, self.innermost, self.through = frame, innermost, through

    @staticmethod
    def here(innermost: FrameType) -> _Caller | None:
        """None: shardc's code, or that of torch's optimizers, or of what compares tensors in a test."""
        through: list[tuple[str, str]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            name = frame.f_globals.get("__name__", "")  # code that fx writes has none
            if name.startswith(("shardc.", "torch.optim.", "torch.testing.")):
                return None
            if name.startswith(_LIBRARIES) or name == "torch":
                through.append((name, frame.f_code.co_name))
            elif name:
                return _Caller(frame, innermost, through)
            frame = frame.f_back
        return None

    @property
    def direct(self) -> bool:
        return not self.through

    def within(self, module: str) -> str:
        """The function of a module of torch's that the user called, or ""."""
        return next((function for name, function in reversed(self.through) if name == module), "")

    def note(self, origin: Origin, text: str) -> None:
        if source.is_models(self.frame.f_code.co_filename):
            place = source.of_frame(self.frame, self.frame.f_lineno)
            origin.tell({place.line: f"{place.code}: {text}"})


def _call(func: Any, args: Any, kwargs: Mapping[str, Any], caller: _Caller) -> Any:
    """A function of torch, called by a user on parts."""
    name = getattr(func, "__name__", "")
    does = kind(name)
    first = _foremost(args, kwargs)
    _refuse_helpers(caller, first)
    if name in _MIXING and getattr(func, "__module__", "").startswith("torch.distributed"):
        _refuse_sum_over_ranks(name, first)
    if does.draws:
        _refuse_draw(name, first.origin)
    if does.decides and name.startswith("_amp"):
        _refuse_scaler()
    with plain():
        if first.split_dims == frozenset() or _calls_others(func, name):
            return func(*args, **kwargs)  # (autograd.grad: shardc.runtime.step.joint_function checks it)
        if any(isinstance(x, SumOfParts) for x in _parts_in((args, kwargs))):
            return _of_sums(func, does, args, kwargs, caller)
        return _of_parts(func, does, args, kwargs, caller)


def _calls_others(func: Any, name: str) -> bool:
    """A function of Python's that calls torch's own, which are looked at then. transformers puts its own in the place
    of torch.nn.init's, for a while, or for good where two threads do so at a time.
    """
    module = getattr(func, "__module__", "")
    return module in ("torch.nn.init", "torch.autograd") or getattr(torch.nn.init, name, None) is func


def _foremost(args: Any, kwargs: Mapping[str, Any]) -> TensorPart:
    """What it is about: what ranks have different parts of, rather than what each has all of; a parameter, rather than
    a gradient.
    """
    return max(_parts_in((args, kwargs)), key=lambda x: (x.split_dims != frozenset(), not x.origin.grad))


def _of_parts(func: Any, does: Kind, args: Any, kwargs: Mapping[str, Any], caller: _Caller) -> Any:
    first = _foremost(args, kwargs)
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if does.name == "__get__" else ""
    if (does.reads and does.name != "__format__") or does.decides:
        _refuse(does.name, first.origin)
    crosses = does.along is not None and not _along_whole(does.along, args, kwargs)
    if crosses and not does.adds:
        _refuse(does.name, first.origin)
    if does.pointwise and does.name != "__setitem__":  # into its place in the whole
        _refuse_wholes(args, kwargs)
    result = func(*args, **kwargs)
    if crosses:
        if not result.requires_grad:  # nothing is trained by it: its number is all that it is for
            _refuse(does.name, first.origin)
        return _sum(result, first.origin)
    if (attribute or does.name) in _SHAPES:
        _refuse_to_load(caller, first)
        _tell_shape(caller, first, attribute or does.name)
    if not does.known and next(_tensors(result), None) is not None:
        _refuse(does.name, first.origin)
    if attribute in ("grad", "_base"):  # a view's base: plain, as torch.compile goes from base to base
        return result
    if not (does.part or does.along is not None):
        return result
    return _as_parts(result, args, first.origin, kept=does.pointwise or does.along is not None)


def _of_sums(func: Any, does: Kind, args: Any, kwargs: Mapping[str, Any], caller: _Caller) -> Any:
    first = next(x for x in _parts_in((args, kwargs)) if isinstance(x, SumOfParts))
    if does.reads or does.name in ("__repr__", "__str__"):
        caller.note(
            first.origin,
            f"this is a sum over the part of {first.origin} that this rank has: its gradient is that of one device, the"
            " number is not. Print the loss before it is added, or compute it in the loss function, where parameters"
            " are whole",
        )
        return func(*args, **kwargs)
    if does.decides:
        _refuse(does.name, first.origin)
    linear = does.linear and _linear(does, args, kwargs)
    result = func(*args, **kwargs)
    if linear:
        return _sum(result, first.origin)
    if not does.finite and next(_tensors(result), None) is not None:
        _refuse(does.name, first.origin)
    return result


def _linear(does: Kind, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Is what is linear in each of its arguments linear in sums of parts, with what else it is called with?"""
    if not all(isinstance(x, SumOfParts) for x in _parts_in((args, kwargs))):
        return False
    if not (does.product or does.quotient):
        return True
    sums = [x for x in _tensors(args) if isinstance(x, SumOfParts)]
    trained = [x for x in _tensors(args) if not isinstance(x, SumOfParts) and x.requires_grad]
    return len(sums) == 1 and not trained and (args[0] is sums[0] or not does.quotient)


def _sum(result: Any, origin: Origin) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)([_sum(x, origin) for x in result])
    if type(result) is not Tensor:
        return result
    total: Any = result
    total.__class__ = SumOfParts  # the object: `loss += penalty` writes to what was plain
    total.origin = origin
    return total


def _along_whole(place: int, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Does this call work along dims only of which this rank has all? Or is it the maximum of two tensors?"""
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if isinstance(dims, Tensor) or isinstance(kwargs.get("other"), Tensor):
        return True
    if not isinstance(x, TensorPart):
        return isinstance(x, Tensor)  # another tensor's, which this one is an argument of
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims or x.split_dims is None:
        return False
    return all(isinstance(d, int) and d % x.ndim not in x.split_dims for d in dims)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for x in result:
            yield from _tensors(x)
    elif isinstance(result, dict):
        yield from _tensors(list(result.values()))


def _parts_in(args: Any) -> Iterator[TensorPart]:
    return (x for x in _tensors(args) if isinstance(x, TensorPart))


def _as_parts(result: Any, args: Any, origin: Origin, *, kept: bool) -> Any:
    """What is new in a result as parts. kept: its dims are those of the arguments, if it has as many."""
    if isinstance(result, (tuple, list)):
        found = [_as_parts(x, args, origin, kept=kept) for x in result]
        return type(result)(found)  # of torch.return_types as well
    if type(result) is not Tensor or any(result is x for x in args):
        return result
    dims: frozenset[int] | None = frozenset()
    for x in args:
        if isinstance(x, TensorPart):
            alike = kept and x.ndim == result.ndim and x.split_dims is not None and dims is not None
            dims = dims | x.split_dims if alike and dims is not None and x.split_dims is not None else None
    return part(result, dims or None, origin)


# --- what is said


def _shown(name: str) -> str:
    bare = name.strip("_").removeprefix("linalg_")
    return {"matmul": "p @ ..."}.get(bare, f"p.{bare}()")


def _refuse(name: str, origin: Origin) -> NoReturn:
    if origin.grad:
        raise ShardcError(
            "this would take the part of the gradient which this rank has for the whole: another result on every rank",
            where=f"{name.strip('_').removeprefix('linalg_')} of {origin}",
            fix="clip with module.clip_grad_norm_(max_norm), which returns the norm of the whole model's gradient,"
            " or by an engine's clip_norm=max_norm, which has it in engine.grad_norm; norms(grad=True) of either has"
            " that of each parameter; clip_grad_value_ and all that"
            f" works element by element is as it is; .grad{_PLAIN}",
        )
    raise ShardcError(
        f"{_shown(name)} would be that of the part which this rank has, another on every rank; a penalty of it has"
        " another gradient than on one device",
        where=origin.fqn,
        fix="compute it in the model's forward or in the loss function (shardc.compile(..., loss=...)), where the"
        " parameter is whole; norms of the whole: module.norms(), engine.norms(); all else of full_state_dict();"
        f" p{_PLAIN}",
    )


def _refuse_scaler() -> NoReturn:
    raise ShardcError(
        "each rank would look for overflows in its part alone: some would skip an update that others make",
        where="torch.amp.GradScaler",
        fix="use program.engine(...) with `precision: {loss_scale: dynamic}`, which skips on all ranks",
    )


def _refuse_draw(name: str, origin: Origin) -> NoReturn:
    raise ShardcError(
        f"{name} would draw for this rank's part alone: other ranks draw the same numbers for theirs, or others than"
        " one device",
        where=str(origin),
        fix="fill it where the model is built (given the function that builds it, each rank computes its part);"
        " or p.copy_() this rank's part of what you draw, under torch.no_grad()",
    )


def _refuse_sum_over_ranks(name: str, x: TensorPart) -> None:
    """As loops do that are written for torch.distributed alone."""
    if x.split_dims == frozenset():
        return
    fix = "leave it out: backward has summed gradients over all ranks that compute some of them"
    if not x.origin.grad:
        fix = "leave it out: weights are alike where they have to be; broadcast=True of program.module and engine sends"
        fix += " those of rank 0"
    raise ShardcError(
        "ranks have different parts of it: this would mix one with another",
        where=f"torch.distributed.{name} of {x.origin}",
        fix=f"{fix}; all_gather takes parts, and {'.grad' if x.origin.grad else 'p'}{_PLAIN}",
    )


def _refuse_helpers(caller: _Caller, x: TensorPart) -> None:
    """Functions of torch's that are written for whole tensors, and would not fail on parts."""
    if (name := caller.within("torch.nn.init")) and name not in _SAME_FILL:
        _refuse_draw(f"nn.init.{name}", x.origin)
    if caller.within("safetensors.torch"):
        raise ShardcError(
            "this rank has a part of it: the file would have that part in the place of the weight",
            where=f"safetensors: {x.origin.fqn or 'a parameter'}",
            fix="write the whole weights: engine.export(folder), or save_file of module.full_state_dict(), which all"
            " ranks call",
        )
    if name := caller.within("torch.nn.utils.convert_parameters"):
        if x.origin.grad:
            _refuse(name, x.origin)
        raise ShardcError(
            "this rank has a part of the parameter: the vector would be another one on every rank, and none the"
            " whole model's",
            where=f"torch.nn.utils.{name}: {x.origin.fqn}",
            fix="take the whole weights, model.load_state_dict(module.full_state_dict()) on all ranks, and the"
            " plain model's parameters for the vector; program.module(model) makes a module of them again",
        )


def _refuse_wholes(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Element by element with a tensor of the whole parameter's shape, as an average of a plain copy of the model is
    computed by zip: torch says that sizes do not match, or spreads one over the other.
    """
    given = (*args, *kwargs.values())
    lists = [x for x in given if isinstance(x, (tuple, list))]  # of _foreach functions
    for row in zip(*lists, strict=False) if lists else [given]:
        wholes = {tuple(x.shape) for x in row if isinstance(x, Tensor) and not isinstance(x, TensorPart)}
        for x in (x for x in row if isinstance(x, TensorPart)):
            whole = tuple(x.origin.shape)
            if whole and whole in wholes and tuple(x.shape) != whole:
                raise ShardcError(
                    f"this is a rank's part {list(x.shape)} of {list(whole)}, with a tensor of the whole's shape",
                    where=x.origin.fqn,
                    fix="an average of weights: of copy.deepcopy(module), or AveragedModel(module), which have the same"
                    " parts; or of the whole weights, module.full_state_dict() on all ranks",
                )


def _refuse_to_load(caller: _Caller, x: TensorPart) -> None:
    """torch compares shapes, where a plain model loads the state_dict of a module."""
    into = caller.innermost.f_locals.get("param")
    if caller.innermost.f_code is nn.Module._load_from_state_dict.__code__ and isinstance(into, Tensor):
        whole = tuple(x.origin.shape)
        if tuple(into.shape) == whole != tuple(x.shape):
            raise ShardcError(
                f"this is a rank's part {list(x.shape)} of the weight {list(whole)} that is loaded",
                where=f"load_state_dict: {x.origin.fqn}",
                fix="load the whole weights: module.full_state_dict(), which all ranks call, or the folder that"
                " engine.export(folder) wrote",
            )


def _tell_shape(caller: _Caller, p: TensorPart, name: str) -> None:
    """The shape of a part is read: nothing fails where a branch is not taken, or a scale is another one."""
    here, whole = tuple(p.shape), p.origin.shape
    flat = len(here) != len(whole)
    if not isinstance(p, ParameterPart) or not caller.direct or here == whole or (name in _DIMS and not flat):
        return
    if name in _DIMS:
        text = (
            f"this reads how many dims a parameter has: {p.origin.fqn} and others are flat stretches here, whose p.ndim"
            " is 1 whatever the model's is. Choose by name, or make the optimizer with module.optimizer(function),"
            " which sees whole shapes"
        )
    else:
        text = (
            f"{name.strip('_')} is that of this rank's part {list(here)}, of {p.origin.fqn} {list(whole)}: right"
            " for what is done element by element, not for a count, a scale or random numbers. program.params has"
            " whole shapes"
        )
    caller.note(p.origin, text)


def refuse_checkpoint_of(fqn: str) -> NoReturn:
    raise ShardcError(
        "this rank has a part of it, which torch.distributed.checkpoint would take for the whole, alike on all ranks",
        where=fqn,
        fix="save by module.save(folder, optimizer) or engine.save(folder), which any mesh loads; or give it the whole"
        " weights, full_state_dict()",
    )
