"""Speed up walks over a model's modules: compiling makes about fifty, half of them in torch's export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

#: Reads an attribute of a module without a record of the read (shardc.capture.attribute_reads).
_attributes = object.__getattribute__


@contextmanager
def quick_walks() -> Iterator[None]:
    """Replace `named_modules` while open by one flat generator; torch's nests one for each level."""
    with mock.patch.object(nn.Module, "named_modules", _named_modules):
        yield


def _named_modules(
    self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as torch's `named_modules`, in the same order."""
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
            if type(module).named_modules is not _named_modules or "named_modules" in held:  # a custom `named_modules`
                yield from module.named_modules(memo, full, remove_duplicate)
            elif module not in memo:
                if remove_duplicate:
                    memo.add(module)
                yield full, module
                inside = held.get("_modules")
                if inside is None:  # a property, in modules that torch.jit traced
                    inside = module._modules
                if inside:
                    under.append((full, iter(inside.items())))
                    break
        else:
            under.pop()
