"""All checks of ops against their definitions, by op."""

from tests.features.fp8 import definitions as definitions_fp8  # noqa: F401 (it registers its own)
from tests.runtime.ops import (  # noqa: F401 (they register theirs)
    definitions_attention,
    definitions_buckets,
    definitions_losses,
    definitions_opaque,
    definitions_parts,
)
from tests.runtime.ops.definitions import CHECKS

__all__ = ["CHECKS"]
