"""More of transformers' families (hf_more.yaml; see zoo/hf.py): models that nobody listed will be tried.

tests/test_models_hf.py tries them with data parallelism, and with whatever their plan or structure says for tensor
parallelism."""

from __future__ import annotations

from tests.zoo import hf

FAMILIES = hf.families("hf_more")
