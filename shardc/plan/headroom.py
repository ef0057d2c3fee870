"""How much of a device's memory a plan may take: all of it, or all but a share that the user leaves.

What the allocator takes beside live bytes, and what libraries take, counts by itself: `Priced.reserved`, `.outside`.
"""

from __future__ import annotations

from shardc.errors import ShardcError
from shardc.machine.device import Device

#: The share that is left, where nobody says another one.
HEADROOM = 0.0


def usable(device: Device, headroom: float) -> float:
    """Bytes. Raises ShardcError for what is no share."""
    if not 0 <= headroom < 1:
        raise ShardcError(
            f"headroom {headroom} is not a share", where="--headroom", fix="a number from 0 to 1, such as 0.05"
        )
    return device.memory * (1 - headroom)
