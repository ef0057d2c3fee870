"""The devices that a check runs on, and why it is skipped where one is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu` on a machine with one")
CUDA: Any = pytest.param("cuda", marks=needs_gpu)
