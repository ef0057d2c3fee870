"""Walks over a model's modules. Compiling makes some fifty, torch's export half of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

#: Of a module, past what capture looks at reads with (shardc.capture.attribute_reads).
_attributes = object.__getattribute__


@contextmanager
def quick_walks() -> Iterator[None]:
    """While open, `named_modules`, on which all other walks stand, is one generator, and not one within the other for
    every module on the way: each module passes through as many as it lies deep.
    """
    with mock.patch.object(nn.Module, "named_modules", _named_modules):
        yield


def _named_modules(
    self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """What torch's gives, in its order."""
    memo = set() if memo is None else memo
    if self in memo:
        return
    if remove_duplicate:
        memo.add(self)
    yield prefix, self
    under: list[tuple[str, Iterator[tuple[str, Any]]]] = [(prefix, iter(self._modules.items()))]
    while under:
        path, children = under[-1]
        for name, module in children:
            if module is None:
                continue
            full = f"{path}.{name}" if path else name
            held = _attributes(module, "__dict__")
            if type(module).named_modules is not _named_modules or "named_modules" in held:  # it has its own
                yield from module.named_modules(memo, full, remove_duplicate)
            elif module not in memo:
                if remove_duplicate:
                    memo.add(module)
                yield full, module
                inside = held.get("_modules")
                if inside is None:  # of what torch.jit has traced it is a property
                    inside = module._modules
                if inside:
                    under.append((full, iter(inside.items())))
                    break
        else:
            under.pop()
