"""Define copies between the device and the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

#: Used instead of axes for copies between device and host, which share one stream. No mesh axis has this name.
HOST_LINK = ("host link",)


@dataclass(frozen=True)
class HostCopy:
    """A stage's line that starts a copy between device and host memory (`checkpoint: {offload: cpu}`).

    bytes: of one rank. cause: the spec line.
    """

    bytes: int
    cause: str = ""
