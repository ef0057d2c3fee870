"""Define `batch: {balance: true}`: rows are dealt to ranks and microbatches by predicted seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from shardc.spec import batch_section
from shardc.spec.check import Check
from shardc.spec.fields import Section
from shardc.spec.yaml_reader import Path


class Batch(batch_section.Batch):
    __doc__ = f"""{batch_section.Batch.__doc__}
    balance: the loader deals the rows of each step to ranks and microbatches by predicted seconds.
    """

    balance: bool = Field(
        default=False,
        description="rows of a step go to ranks and microbatches by predicted seconds; with lengths, each microbatch "
        "is as long as its longest row needs",
    )


class Sections(Section):
    """The section of core that this feature extends."""

    batch: Batch = Field(default=Batch(), examples=[{"microbatches": 8}])

    def patterns(self) -> Iterator[tuple[Path, str, bool]]:
        """Yield nothing: no pattern of the section names a weight."""
        yield from ()


def check(spec: Check) -> None:
    """Check that nothing else in the spec needs microbatches of one length."""
    batch: Any = spec.form.batch
    if not getattr(batch, "balance", False) or not batch.lengths:
        return
    execution = spec.form.execution
    for key, used in (("overlap", execution.overlap != "none"), ("graphs", execution.graphs)):
        if used:
            fix = "leave it out, or `balance` of `batch`"
            spec.add(("execution", key), "microbatches of several lengths cannot be one graph", fix)
