"""All checks of ops against their definitions, by op."""

from tests.runtime.ops import (  # noqa: F401 (they register theirs)
    definitions_attention,
    definitions_buckets,
    definitions_fp8,
    definitions_losses,
    definitions_opaque,
    definitions_parts,
)
from tests.runtime.ops.definitions import CHECKS

__all__ = ["CHECKS"]
