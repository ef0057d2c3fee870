"""Define the modules that are captured: the loss with named values beside it, or only values.

The loss is in the model's output, or computed by a function of the user. A forward-only program has only values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shardc.capture.batch import Leaves, arguments
from shardc.capture.rewrite.autograd_function import SideTerm, with_side_terms
from shardc.errors import ShardcError
from shardc.ir.outputs import OtherForward
from shardc.ir.similar_names import did_you_mean
from shardc.ir.source import of_exception, of_function
from shardc.torch_private import traced_node

Loss = Callable[[Any, Any], Any]
#: Values of a forward-only program: a function of (the model's output, batch), or True: the tensors in that output; or
#: another forward.
Forward = Callable[[Any, Any], Any] | Literal[True] | OtherForward
#: The name of a value that has none.
OUTPUT = "output"
CONTRACT = "return (loss, {name: real tensor}); a mean may also be (sum, count), both tensors of one element"


#: Types of a tensor's number in Python, also while it is traced.
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def check_loss(loss: object, name: str = "loss") -> None:
    """Raise ShardcError for a loss that is no function of (output, batch). name: of the argument."""
    does = "F.mse_loss(output, batch['y'])" if name == "loss" else "{'logits': output}"
    other = 'True, "score", or ' if name == "forward" else ""
    fix = f"pass {other}a function: {name}=lambda output, batch: {does}"
    if not callable(loss):
        raise ShardcError(f"{name} is {_described(loss)}, not a function", where=name, fix=fix)
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        fault = f"{name} is the class {loss.__name__}, not a function"
        fix = f"call it on the tensors: {name}=lambda output, batch: nn.{loss.__name__}()(output, batch['y'])"
        raise ShardcError(fault, where=name, fix=fix)
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except TypeError as e:
        fault = f"{name} takes (output, batch), and cannot be called with these two: {e}"
        raise ShardcError(fault, where=of_function(function).line or name, fix=fix) from None
    except ValueError:  # a builtin, whose arguments Python does not know
        return
    names = tuple(signature.parameters)[:2]
    if len(names) == 2 and names[0] in _BATCH_NAMES and names[1] in _OUTPUT_NAMES:
        raise swapped_arguments_error(name, function, names)


#: Usual names of the two arguments of a loss. With names in the wrong order it may still run: a loss
#: of two tensors is then a different one.
_BATCH_NAMES = ("batch", "data", "inputs", "target", "targets", "label", "labels", "y_true")
_OUTPUT_NAMES = ("out", "output", "outputs", "logits", "pred", "preds", "prediction", "predictions", "y_pred")


def swapped_arguments_error(name: str, function: Any, names: Sequence[str] = ()) -> ShardcError:
    """Return the error for a loss whose two arguments are in the wrong order."""
    shown = f"({', '.join(names)})" if names else "(batch, output)"
    fault = f"{name} takes {shown}, and is called with (output, batch): the model's output comes first"
    fix = f"write def {name}(output, batch), or {name}=lambda output, batch: ..."
    return ShardcError(fault, where=of_function(function).line or name, fix=fix)


class Names:
    """The names of values beside the loss, mapped to the name of their divisor, or "".

    A separate object, as export resets attributes of a module. of_loss: the model's forward is done, and the user's
    loss runs. notes: on the choice of the loss.
    """

    def __init__(self) -> None:
        self.divisors: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self.of_loss = False


class LossOf(nn.Module):
    """A module that takes the batch's tensors and returns the scalar loss and named values beside it.

    Anything else that the model returns, such as caches, is dropped from the graph. .beside: after a call, the names of
    those values.
    """

    def __init__(self, model: nn.Module, leaves: Leaves, loss: Loss | None) -> None:
        super().__init__()
        self.model, self.leaves = model, leaves
        self._loss = (loss,)  # in a tuple, so that a loss module is no submodule: its tensors are constants
        self.side: list[SideTerm] = []  # terms of the loss of which only the gradient counts
        self.beside = Names()

    @property
    def loss(self) -> Loss | None:
        return self._loss[0]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = self.leaves.batch(tensors)
        args, kwargs = arguments(self.model, batch, self.loss is not None)
        if kwargs.get("use_cache") is True and hasattr(getattr(self.model, "config", None), "use_cache"):
            kwargs = {**kwargs, "use_cache": False}  # as transformers.without_cache does
        output = self.model(*args, **kwargs)
        line = of_function(self.loss or self.model.forward).line
        self.beside.of_loss = self.loss is not None  # errors from here on are the loss's
        if self.loss is not None:
            loss, beside = _of_function(self._of(output, batch))
        else:
            loss, beside = _of_model(output, line)
            self.beside.notes = _several(output, loss, line)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            if isinstance(loss, _NUMBERS):
                fault = "the loss is a Python number, from .item(), float() or int(): it has no gradient"
                raise ShardcError(fault, where=line, fix="remove that call: return the tensor")
            fault = f"the loss is {_described(loss)}, not a scalar"
            fix = "return one floating-point number, e.g. loss.mean()"
            if loss is None:
                fault, fix = "the loss function returns nothing", "end it with `return loss`"
            elif isinstance(loss, Mapping):
                fault = f"the loss is a dict without 'loss', of {', '.join(map(repr, loss))}"
                fix = "name the number that is trained 'loss', or return (loss, {name: value})"
            elif isinstance(loss, (tuple, list)):
                fix = "return one number, such as their sum; to log them too, (loss, {name: value})"
            raise ShardcError(fault, where=line, fix=fix)
        loss = loss.reshape(()) if loss.dim() else loss
        values = self._flat(beside, line)
        return (with_side_terms(loss, self.side), *values)

    def _of(self, output: Any, batch: Any, function: Loss | None = None) -> Any:
        """Call the user's function, by default the loss. Raises ShardcError if it reads a missing batch key."""
        function = function or self.loss
        assert function is not None
        try:
            return function(output, batch)
        except Exception as e:  # any kind; raised again
            name = "loss" if self.loss is not None else "forward"
            if _runs_swapped(function, output, batch):
                raise swapped_arguments_error(name, function) from e
            if not isinstance(e, KeyError):
                raise
            if not isinstance(batch, Mapping) or not e.args or e.args[0] in batch:
                raise
            at, keys = of_exception(e), ", ".join(map(repr, batch))
            name = "the loss" if self.loss is not None else "forward(output, batch)"
            fault = f"{name} reads {e.args[0]!r}, but the batch has {keys}"
            other = "use one of these, or return that key from batch() too"
            fix = did_you_mean(str(e.args[0]), map(str, batch), other)
            raise at.error(fault, fix) from e

    def _flat(self, beside: Mapping[str, Any], line: str) -> list[Tensor]:
        values: dict[str, Tensor] = {}
        divisors = {name: f"{name} (count)" for name, value in beside.items() if _is_ratio(value)}
        for name, value in beside.items():
            if name in divisors:
                values |= {name: value[0].reshape(()), divisors[name]: value[1].reshape(())}
            elif not isinstance(value, Tensor) or value.is_complex():
                if isinstance(value, _NUMBERS):
                    fault = f"the output {name!r} is a Python number, from .item(), float() or int()"
                    fix = "remove that call: the value stays a tensor until it is read"
                    if isinstance(value, (int, float)):  # a tensor's value would be a symbol in tracing
                        fault = f"the output {name!r} is the Python number {value}, not a tensor"
                        fix = f"write torch.tensor({value}), or leave out the .item(), float() or int() that made it"
                    raise ShardcError(fault, where=line, fix=fix)
                raise ShardcError(f"the output {name!r} is {_described(value)}", where=line, fix=CONTRACT)
            else:
                values[name] = value
        self.beside.divisors = {name: divisors.get(name, "") for name in values}
        return [x.detach() for x in values.values()]


class ValuesOf(LossOf):
    """A module that takes the batch's tensors and returns a forward-only program's values (`.beside`)."""

    def __init__(self, model: nn.Module, leaves: Leaves, forward: Forward) -> None:
        super().__init__(model, leaves, None)
        self.values = forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = self.leaves.batch(tensors)
        args, kwargs = arguments(self.model, batch, own_loss=True)
        output = self.model(*args, **kwargs)
        if self.values is True:
            line = of_function(self.model.forward).line
            values: Mapping[str, Any] = tensors_in(output)
        else:
            line = of_function(self.values).line
            assert callable(self.values), "another forward has its own module"
            self.beside.of_loss = True
            returned = self._of(output, batch, self.values)
            single = isinstance(returned, Tensor)
            values = returned if isinstance(returned, Mapping) else {OUTPUT: returned} if single else {}
        if not values:
            fault = f"it returns {_described(output if self.values is True else returned)}: there is no tensor in it"
            raise ShardcError(fault, where=line, fix="return a tensor, or {name: tensor}")
        return tuple(self._flat(values, line))


def values_of_batch(model: nn.Module, leaves: Leaves, loss: Loss | None, forward: Forward | None) -> LossOf:
    """Return the module that is captured, whose inputs are the batch's tensors. forward: replaces the loss."""
    if isinstance(forward, OtherForward):
        return cast(LossOf, forward.module(model, leaves))
    return LossOf(model, leaves, loss) if forward is None else ValuesOf(model, leaves, forward)


def tensors_in(output: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors in a model's output, by name; in tuples by number: "hidden_states.0". No caches."""
    if isinstance(output, Tensor):
        return {} if output.is_complex() else {name or OUTPUT: output}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        items = ((k, x) for k, x in output.items() if k != "past_key_values")
    elif isinstance(output, (tuple, list)):
        items = enumerate(output)
    tensors: dict[str, Tensor] = {}
    for key, x in items:
        tensors |= tensors_in(x, f"{name}.{key}" if name else str(key))
    return tensors


def _runs_swapped(function: Loss, output: Any, batch: Any) -> bool:
    """Return whether a failed loss returns a number for (batch, output)."""
    try:
        loss, _ = _of_function(function(batch, output))
    except Exception:  # any kind: the error of the normal call is reported
        return False
    return isinstance(loss, Tensor) and loss.numel() == 1


def _of_function(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return (loss, named values) from what the user's loss returns."""
    if isinstance(returned, Mapping) and "loss" in returned:
        return returned["loss"], {k: x for k, x in returned.items() if k != "loss" and x is not None}
    return (returned[0], returned[1]) if _is_pair(returned) else (returned, {})


def _of_model(output: Any, line: str) -> tuple[Any, Mapping[str, Any]]:
    """Return (loss, named values) from what the model returns; in a plain dict, its other scalars."""
    if _is_pair(output) and all(isinstance(x, Tensor) or _is_ratio(x) for x in output[1].values()):
        return output[0], output[1]
    loss = default_loss(output, line)
    plain = output if type(output) is dict else {}
    return loss, {k: x for k, x in plain.items() if k != "loss" and isinstance(k, str) and _is_number(x)}


def _several(output: Any, loss: Any, line: str) -> tuple[str, ...]:
    """Write the note on a model that returns several numbers, of which the first is used as the loss."""
    if not isinstance(output, (tuple, list)) or hasattr(output, "_fields") or loss is not output[0]:
        return ()
    others = [i for i, x in enumerate(output) if i and _is_number(x) and x.is_floating_point()]
    if not others:
        return ()
    return (
        f"{line}: the model returns {len(others) + 1} single numbers, and the first of them is the loss: if the loss "
        f"is another, or their sum, pass loss=lambda output, batch: output[0] + output[{others[0]}]",
    )


def _is_pair(x: Any) -> bool:
    """Return whether it is (scalar, {name: ...})."""
    pair = isinstance(x, (tuple, list)) and len(x) == 2 and _is_number(x[0]) and type(x[1]) is dict
    return pair and all(isinstance(k, str) for k in x[1])


def _is_ratio(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and all(map(_is_number, x))


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1


def default_loss(output: Any, where: str = "") -> Any:
    """Return the loss in a model's output: itself, its `.loss`, "loss", first element or only number.

    `(logits, loss)` has one number. where: the model's line, for the error if there is none.
    """
    candidate = output
    if not isinstance(output, Tensor):
        candidate = getattr(output, "loss", None)
        if candidate is None and isinstance(output, Mapping):
            candidate = output.get("loss")
        elif candidate is None and isinstance(output, (tuple, list)) and output:
            numbers = [x for x in output if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
            candidate = output[0] if len(numbers) != 1 else numbers[0]
    if not isinstance(candidate, Tensor) or candidate.numel() != 1:
        raise ShardcError(
            f"the model returns {_described(output)}: there is no scalar loss in it",
            where=where,
            fix=(
                "define loss(output, batch) in the model's file, in Python pass loss=lambda output, batch: ...; "
                "or pass the model the labels, so that it computes its loss itself"
            ),
        )
    return candidate


def _described(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
