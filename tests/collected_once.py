"""The last that is imported by what processes are forked from (warm.py): their collectors do not look through what they
share, which would also make copies of its pages.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
