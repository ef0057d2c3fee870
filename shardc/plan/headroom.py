"""How much of a device's memory a plan may take: all but a share that is left to what is no tensor.

That is the allocator's gaps, NCCL's buffers and the workspaces of kernels. (`Cost.reserved` and `Cost.outside` count
these, of a program.)
"""

from __future__ import annotations

from shardc.cost.device import Device
from shardc.errors import ShardcError

#: The share that is left, where nobody says another one.
HEADROOM = 0.05


def usable(device: Device, headroom: float) -> float:
    """Bytes. Raises ShardcError for what is no share."""
    if not 0 <= headroom < 1:
        raise ShardcError(
            f"headroom {headroom} is not a share", where="--headroom", fix=f"a number from 0 to 1, such as {HEADROOM}"
        )
    return device.memory * (1 - headroom)
