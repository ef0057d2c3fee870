"""The digest of a slice of a checkpoint: XXH3 of its bytes, 128 bits (https://xxhash.com), as 32 hexadecimal digits.

It finds damage, not forgery: whoever can write a checkpoint can write its digests. It reads at the speed of memory, 27
GB/s on one core of an AMD EPYC, so that saving and loading do not wait for it. Another one is another version of the
index (checkpoint_index.VERSION).
"""

from __future__ import annotations

import re

from xxhash import xxh3_128 as Digest
from xxhash import xxh3_128_hexdigest as digest_of

__all__ = ["TEXT", "Digest", "digest_of"]

#: What a digest looks like in the index.
TEXT = re.compile(r"[0-9a-f]{32}")
