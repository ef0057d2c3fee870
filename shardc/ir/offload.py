"""Define offload: state that is kept off the device, and copies to the host's memory and back."""

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


@dataclass(frozen=True)
class OffloadPlaces:
    """Where a rank keeps idle state: "none" (on its device), "cpu", or a directory for files.

    optimizer: the optimizer's state; parameters: at zero 3, this rank's parts of them; page_mb: MiB of parameters in a
    page of the optimizer's step.
    """

    optimizer: str = "none"
    parameters: str = "none"
    page_mb: float = 0.0

    @property
    def used(self) -> dict[str, str]:
        """{kind of state: place} of the state that is kept off the device."""
        places = {"optimizer": self.optimizer, "parameters": self.parameters}
        return {kind: place for kind, place in places.items() if place != "none"}
