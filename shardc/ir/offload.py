"""What does not stay on the device: which state lies elsewhere, and copies to the host's memory and back."""

from __future__ import annotations

from dataclasses import dataclass

#: Stands in the place of axes for copies between a device's memory and the host's, which share one stream. No axis of a
#: mesh is called so.
HOST_LINK = ("host link",)


@dataclass(frozen=True)
class HostCopy:
    """A line of a stage begins to copy a value from the device's memory to the host's, or back (`checkpoint:
    {offload: cpu}`). bytes: of one rank. cause: the spec line.
    """

    bytes: int
    cause: str = ""


@dataclass(frozen=True)
class OffloadPlaces:
    """Where a rank keeps what it is not working with: "none" (on its device), "cpu", or a directory for files.

    optimizer: the optimizer's state; parameters: at zero 3, this rank's parts of them; page_mb: how much of the
    optimizer's state is brought to the device at a time."""

    optimizer: str = "none"
    parameters: str = "none"
    page_mb: float = 25.0

    @property
    def used(self) -> dict[str, str]:
        """{what: place} of what is kept off the device."""
        places = {"optimizer": self.optimizer, "parameters": self.parameters}
        return {kind: place for kind, place in places.items() if place != "none"}
