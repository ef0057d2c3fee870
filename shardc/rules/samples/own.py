"""Sample calls as users write them: argument tuples, or functions that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.rules.samples.make import Arguments, Sample, Tensors

#: `(x, w)`, `((x, w), {"eps": 1e-6})`, a function of nothing that returns either, or a function of `Tensors` as rules'
#: own samples.
Given = tuple[Any, ...] | Tensor | Callable[..., Any]


def as_sample(given: Given, where: str = "") -> Sample:
    """A sample from what a user gave. Functions of nothing run under a fixed random seed, and leave torch's state
    alone.
    """
    if callable(given) and not isinstance(given, Tensor):
        takes = bool(inspect.signature(given).parameters)

        def made(t: Tensors) -> Arguments:
            if takes:
                return arguments(given(t), where)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(t.seed)
                return arguments(given(), where)

        return made
    fixed = arguments(given, where)
    return lambda _: fixed


def arguments(given: Any, where: str = "") -> Arguments:
    """(args, kwargs) of a call. Raises ShardcError for what is neither."""
    if isinstance(given, Tensor):
        return (given,), {}
    if not isinstance(given, tuple):
        what = f"a sample is a {type(given).__name__}, not a tuple of arguments"
        raise ShardcError(what, where=where, fix="samples=[lambda: (torch.randn(4, 12), torch.randn(12))]")
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given[0], given[1]
    return given, {}
