"""Step an optimizer whose state is kept outside of the device, page by page.

    fetch 1 | step 1, fetch 2 | step 2, put 1, fetch 3 | step 3, put 2, fetch 4 | ...    fetch, put: in the background

A page is some parameters with their state; at most two pages are on the device. The optimizer is tested for whether
stepping page by page equals one step of all. One that, say, scales every update by the norm of all of them is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.runtime.offload import Offload
from shardc.runtime.offload.copies import Home
from shardc.runtime.offload.storage import room_of
from shardc.runtime.zero.optimizer_check import group_settings, only_params, why_all_at_once
from shardc.runtime.zero.several_optimizers import class_of


class Paged:
    """Steps `optimizer` page by page; its parameters, and its state if the spec says so, are in `offload`.

    Between steps `optimizer.state` holds CPU tensors with current values. State that is nested in lists or dicts of a
    parameter's state is not moved. Hooks on the optimizer's step run once a page.
    """

    def __init__(self, optimizer: Optimizer, offload: Offload) -> None:
        check_separable(optimizer)
        self.optimizer, self._offload = optimizer, offload
        self._state: dict[nn.Parameter, dict[str, Home]] = {}
        self._here: set[nn.Parameter] = set()  # offloaded parameters that are on the device now
        self.rest()

    def step(self) -> None:
        """Step all parameters that have gradients, as the optimizer's step does."""
        pages = self._pages()
        before = group_settings(self.optimizer)
        next_page = self._fetch(pages[0]) if pages else None
        try:
            for i, page in enumerate(pages):
                assert next_page is not None
                keys, fetched = next_page
                self._place(keys, self._offload.mover.taken(fetched))
                next_page = self._fetch(pages[i + 1]) if i + 1 < len(pages) else None
                try:
                    with only_params(self.optimizer, page, before):
                        self.optimizer.step()
                finally:
                    self._put_page(page)
        finally:
            self._offload.mover.drain()
            self._offload.changed()

    def rest(self) -> None:
        """Offload all state that a constructor or a checkpoint has made."""
        for page in self._pages(every=True):
            self._put_page(page)
            self._offload.mover.drain()

    def room(self, p: nn.Parameter, name: str, like: Tensor) -> Tensor:
        """Return a tensor for state of this name and form, which a checkpoint fills; it may hold old values."""
        if "optimizer" not in self._offload.places or not _moves(like, like.device):
            return torch.zeros_like(like, device=p.device)
        if not self._fits(p, name, like):
            slot = self._offload.places["optimizer"].slot(room_of([like]))
            self._state.setdefault(p, {})[name] = Home(slot.take(like), slot)
        return self._state[p][name].tensor

    def _pages(self, every: bool = False) -> list[list[nn.Parameter]]:
        """Return the parameters that a step updates, cut into pages of about a bucket's size."""
        pages: list[list[nn.Parameter]] = []
        filled = 0
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.grad is None and not every:
                continue
            if not pages or filled + p.nbytes > self._offload.page_bytes:
                pages.append([])
                filled = 0
            pages[-1].append(p)
            filled += p.nbytes
        return pages

    def _fetch(self, page: Sequence[nn.Parameter]) -> tuple[list[tuple[nn.Parameter, str]], Future[Any]]:
        """Start to fetch a page; return its (parameter, key) pairs, key "" for itself, and future tensors."""
        keys, homes = [], []
        for p in page:
            stored = {"": self._offload.homes[p]} if p in self._offload.homes else {}
            state = self.optimizer.state.get(p, {})
            stored |= {k: h for k, h in self._state.get(p, {}).items() if self._is_stored(p, k, state.get(k))}
            keys += [(p, k) for k in stored]
            homes += list(stored.values())
        return keys, self._offload.mover.fetch(homes)

    def _place(self, keys: Sequence[tuple[nn.Parameter, str]], tensors: Sequence[Tensor]) -> None:
        """Put fetched tensors where the optimizer reads them: into parameters and its state."""
        for (p, key), x in zip(keys, tensors, strict=True):
            if key:
                self.optimizer.state[p][key] = x
            else:
                p.data = x
                self._here.add(p)

    def _put_page(self, page: Sequence[nn.Parameter]) -> None:
        """Start to put a page back. State that is new, or has changed its form, gets new room."""
        moves = [(p.data, self._offload.homes[p]) for p in page if p in self._here]
        for p in self._here.intersection(page):
            self._offload.rest(p)
        self._here.difference_update(page)
        self._offload.mover.put(moves)
        if "optimizer" not in self._offload.places:
            return
        moved = [
            (p, key, x)
            for p in page
            for key, x in self.optimizer.state.get(p, {}).items()
            if isinstance(x, Tensor) and (_moves(x, self._offload.device) or self._is_stored(p, key, x))
        ]
        forms = {(p, key): torch.empty_like(x, device="meta") for p, key, x in moved}  # dense strides
        new = [key for key, form in forms.items() if not self._fits(*key, form)]
        if new:  # in one piece, before anything moves, as missing room ends the run
            slot = self._offload.places["optimizer"].slot(room_of(forms[key] for key in new))
            for p, key in new:
                self._state.setdefault(p, {})[key] = Home(slot.take(forms[p, key]), slot)
        self._offload.mover.put([(x, self._state[p][key]) for p, key, x in moved])
        for p, key, _ in moved:
            self.optimizer.state[p][key] = self._state[p][key].tensor

    def _is_stored(self, p: nn.Parameter, key: str, x: Any) -> bool:
        home = self._state.get(p, {}).get(key)
        return home is not None and home.tensor is x

    def _fits(self, p: nn.Parameter, key: str, form: Tensor) -> bool:
        home = self._state.get(p, {}).get(key)
        if home is None:
            return False
        a, b = home.tensor, form
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _moves(x: Tensor, device: torch.device) -> bool:
    """Return whether state is worth moving. Counts of steps are not; some stay on the CPU anyway."""
    return x.dim() > 0 and x.numel() > 0 and x.device == device


def check_separable(optimizer: Optimizer) -> None:
    """Raise ShardcError for an optimizer whose update of a parameter depends on other parameters."""
    why = why_all_at_once(optimizer)
    if why is not None:
        kind = class_of(optimizer)
        raise ShardcError(
            f"{why}, but data.offload has only some of them on the device at once",
            where="data.offload",
            fix=(
                "use an optimizer that updates every parameter separately (SGD, Adam, AdamW, ...), or leave"
                f" data.offload out with {kind}"
            ),
        )
