"""State of an optimizer that is no tensor but holds some: lists, tuples and dicts, such as Shampoo's list of a
preconditioner for each dim. A checkpoint has each of their tensors under a name of its own, and the rest as plain
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: In the place of a tensor in plain values: the key of {KEY: name}.
KEY = "tensor"


def flattened(name: str, x: Any) -> tuple[dict[str, Tensor], Any]:
    """({name: tensor}, the rest): of a container its tensors as "name/0" and so on, and itself with {"tensor": name} in
    their places; of what holds no tensor, none, and itself.
    """
    if isinstance(x, Tensor):
        return {name: x}, {KEY: name}
    items = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    tensors: dict[str, Tensor] = {}
    rest: list[tuple[Any, Any]] = []
    for k, each in items:
        found, plain = flattened(f"{name}/{k}", each)
        tensors |= found
        rest.append((k, plain))
    if not tensors:
        return {}, x
    kind = "dict" if isinstance(x, Mapping) else "tuple" if isinstance(x, tuple) else "list"
    return tensors, {kind: dict(rest) if kind == "dict" else [v for _, v in rest]}


def restored(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `flattened` took apart."""
    if isinstance(plain, Mapping) and len(plain) == 1:
        ((kind, inside),) = plain.items()
        if kind == KEY and isinstance(inside, str) and inside in tensors:
            return tensors[inside]
        if kind == "dict" and isinstance(inside, Mapping):
            return {k: restored(v, tensors) for k, v in inside.items()}
        if kind in ("list", "tuple") and isinstance(inside, list):
            each = [restored(v, tensors) for v in inside]
            return tuple(each) if kind == "tuple" else each
    return plain
