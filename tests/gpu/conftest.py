"""Checks that want a GPU. `make gpu` runs them on a machine with one; without one the same code runs on what there is.

Every check takes its device: "cuda"; "cpu", over gloo or torch's fake process group; or "second", the made-up device of
tests/second_device.py, where a check asks for what the host waits.
"""

from __future__ import annotations

import pytest

from tests.gpu.devices import CUDA


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """device: "cpu" and "cuda"; gpu: "cuda" alone, for which nothing stands in."""
    for name, values in {"device": ["cpu", CUDA], "gpu": [CUDA]}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)
