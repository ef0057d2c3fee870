"""A second device without hardware: its tensors say "meta" and keep their numbers on the CPU.

What a GPU would refuse is refused here (operands on two devices), and what would make the host wait for one is counted:
values that Python reads (`.item()`), shapes that hang on values (`nonzero`), copies from and to ordinary memory.

    with second_device() as device:
        x = torch.ones(3, device=device.name)
        x + torch.ones(3)          # RuntimeError: add.Tensor: operands on two devices
        x.sum().item()
        device.syncs               # ["_local_scalar_dense: test_x.py:12"]
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "meta"  # autograd gives other devices a thread each, which ranks that are threads would share
aten = torch.ops.aten
#: Ops whose results, or their shapes, the host reads.
READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.allclose,
}
#: Ops that copy between devices.
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._copy_from}


class SecondDevice:
    """name: of the device; syncs: what made the host wait, in order, since the list was last cleared."""

    name = NAME

    def __init__(self) -> None:
        self.syncs: list[str] = []

    def note(self, op: Any) -> None:
        frames = (f for f in reversed(traceback.extract_stack()) if "/torch/" not in f.filename)
        here = next(f for f in frames if f.filename != __file__)
        self.syncs.append(f"{op.__name__}: {'/'.join(here.filename.split('/')[-3:])}:{here.lineno} {here.name}")


class OnSecond(Tensor):
    """A tensor of the second device; numbers: on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnSecond:
        numbers = numbers.resolve_conj().resolve_neg()  # marks that the outer tensor does not have
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME),
        )
        made.numbers = numbers
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnSecond({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, _ACTIVE[-1] if _ACTIVE else SecondDevice())


_ACTIVE: list[SecondDevice] = []


def _run(func: Any, args: Any, kwargs: Any, device: SecondDevice) -> Any:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, OnSecond)]
    wanted = kwargs.get("device")
    packet = getattr(func, "overloadpacket", None)
    if ours and packet not in COPIES:
        others = [x for x in tensors if not isinstance(x, OnSecond) and x.dim() > 0]
        if others and packet is not aten.index_put_ and packet is not aten.index:
            raise RuntimeError(f"{func.__name__}: operands on {NAME} and {others[0].device}")
    if ours and (packet in READS or _reads(packet, args, kwargs)):
        device.note(func)
    if packet in COPIES and not kwargs.get("non_blocking") and _crosses(packet, args, wanted):
        device.note(func)
    plain_args, plain_kwargs = pytree.tree_map(_plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    stays = bool(ours) and wanted is None
    if packet is aten.copy_:
        stays = isinstance(args[0], OnSecond)
    if not stays and (wanted is None or torch.device(wanted).type != NAME):
        return result
    by_numbers = {id(x.numbers): x for x in ours}
    return pytree.tree_map(
        lambda x: by_numbers.get(id(x)) if id(x) in by_numbers else OnSecond(x) if isinstance(x, Tensor) else x, result
    )


def _plain(x: Any) -> Any:
    if isinstance(x, OnSecond):
        return x.numbers
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _reads(packet: Any, args: Any, kwargs: Any) -> bool:
    """Ops that read values for the shape of their result, depending on their arguments."""
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if packet in (aten.index, aten.index_put_, aten.index_put):
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return False


def _crosses(packet: Any, args: Any, wanted: Any) -> bool:
    if packet is aten._to_copy:
        return wanted is not None and isinstance(args[0], OnSecond) != (torch.device(wanted).type == NAME)
    return isinstance(args[0], OnSecond) != isinstance(args[1], OnSecond)


class _Mode(TorchDispatchMode):
    def __init__(self, device: SecondDevice) -> None:
        super().__init__()
        self.second = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.second)


@contextmanager
def second_device() -> Iterator[SecondDevice]:
    """The device in this thread; of other threads only ops that have a tensor of it."""
    device = SecondDevice()
    _ACTIVE.append(device)
    try:
        with _Mode(device):
            yield device
    finally:
        _ACTIVE.remove(device)
