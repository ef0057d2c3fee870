"""Build the submodules of a program's module: they hold parameters and buffers, and run nothing.

They have the model's classes and attributes, so that code which looks for layers finds them: groups of an optimizer
by `isinstance(m, nn.Linear)`, `module.apply(init)`, a loop over blocks, `bn.reset_running_stats()`. If such code
changes what the program does not see, the next forward refuses it, as capture does in a captured model
(shardc.runtime.checks.user_changes): attributes that forward reads, modes, hooks, and replaced submodules or
parameters.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError

#: Attributes that every nn.Module has, such as its hooks.
_INTERNALS = frozenset(vars(nn.Module()))
#: Marks values that would keep weights alive, or belong to the model's modules.
_LEFT_OUT = object()
#: How deep nested objects are followed.
_DEEP = 4
#: A part does not use its class's overrides of these: its state is that of its parameters and buffers.
_STATE = ("_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state")


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse to run a part: the forward of every part."""
    fault = "a part of the module cannot run separately: the program is of the whole forward"
    fix = "let the loss function return the value: it comes back beside the loss; or compile that part as a "
    fix += "separate model"
    raise ShardcError(fault, where="a submodule of program.module(...)", fix=fix)


class Part(nn.Module):
    """A submodule whose class is unknown, since there is no model."""

    forward = staticmethod(refuse)


def add_parts(root: nn.Module, model: nn.Module) -> None:
    """Give `root` submodules like those of `model`, with their names, classes and attributes. Keeps neither alive."""
    parts = {id(model): root}
    _grow(model, root, parts)
    for m in model.modules():
        if m is not model:
            _describe(m, parts[id(m)], parts)


def parent_of(root: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """Return the module below `root` that holds `fqn` (made if necessary), and the last part of the name."""
    *path, name = fqn.split(".")
    module: Any = root
    for part in path:
        if module._modules.get(part) is None:
            module._modules[part] = Part()
        module = module._modules[part]
    return module, name


def _grow(model: nn.Module, part: nn.Module, parts: dict[int, nn.Module]) -> None:
    """Make parts for all submodules; a module in several places is one part there."""
    for name, child in model._modules.items():
        if child is None:
            part._modules[name] = None
            continue
        if id(child) not in parts:
            parts[id(child)] = _part_like(child)
            _grow(child, parts[id(child)], parts)
        part._modules[name] = parts[id(child)]


def _part_like(module: nn.Module) -> nn.Module:
    """Make a module of the same class without running its constructor: no weights, no hooks."""
    if isinstance(module, (Part, torch.jit.ScriptModule)):
        return Part()
    cls = type(module)
    part: nn.Module = object.__new__(cls)
    nn.Module.__init__(part)
    part.__dict__["forward"] = refuse
    for name in _STATE:
        if getattr(cls, name) is not getattr(nn.Module, name):
            part.__dict__[name] = _plain_method(name, part)
    return part


def _plain_method(name: str, part: nn.Module) -> Any:
    """Return nn.Module's own method, bound to a part by a weak reference."""
    owner, method = ref(part), getattr(nn.Module, name)
    return lambda *args, **kwargs: method(owner(), *args, **kwargs)


def _describe(module: nn.Module, part: nn.Module, parts: dict[int, nn.Module]) -> None:
    """Copy a module's attributes to its part, with parts for modules, and None for missing parameters."""
    part._parameters.update({name: None for name, p in module._parameters.items() if p is None})
    part._buffers.update({name: None for name, b in module._buffers.items() if b is None})
    for name, value in vars(module).items():
        if name in _INTERNALS or name in part.__dict__:
            continue
        if (kept := _part_value(value, parts)) is not _LEFT_OUT:
            part.__dict__[name] = kept


def _part_value(value: Any, parts: dict[int, nn.Module], depth: int = 0) -> Any:
    """Return a value for a part; _LEFT_OUT for tensors, and for objects that hold any."""
    if isinstance(value, nn.Module):
        return parts.get(id(value), _LEFT_OUT)
    if isinstance(value, (Tensor, types.MethodType)) or depth > _DEEP:
        return _LEFT_OUT
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)):
        return value
    if isinstance(value, (list, tuple, dict, set)):
        items = [_part_value(x, parts, depth + 1) for x in (value.values() if isinstance(value, dict) else value)]
        if any(x is _LEFT_OUT for x in items):
            return _LEFT_OUT
        if all(x is y for x, y in zip(items, value.values() if isinstance(value, dict) else value, strict=True)):
            return value
        if isinstance(value, dict):
            return dict(zip(value, items, strict=True))
        return list(items) if isinstance(value, list) else tuple(items)
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    # the object itself is kept, so it must hold no modules, which would be the model's
    return value if all(_part_value(x, parts, depth + 1) is x for x in inside) else _LEFT_OUT
