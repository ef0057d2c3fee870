"""Any model class of transformers, tiny: its config by the names of its fields, its batch by what its forward takes.

    model, batch = hf_any.build("MiniMaxM2ForCausalLM")

A class that tests/zoo/hf.py or hf_more.py has a row for is built by that; the others by the rules of hf_configs.py and
hf_batches.py, which fit most.
"""

from __future__ import annotations

import functools
import re
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardc.torch_private import pytree
from tests.zoo import Batch, Built, hf_batches, hf_configs, ready
from tests.zoo.hf import FAMILIES, Family
from tests.zoo.hf import build as build_row

#: Parameters of a tiny model at most: several copies in float64 are made of it.
LARGEST = 40_000_000
#: Seconds of the processor after which no further config is tried.
SECONDS = 20


@functools.cache
def rows() -> dict[str, Family]:
    """The families with a row of their own, by the name of their class."""
    from tests.zoo import hf_more, sequences

    listed = [*FAMILIES.values(), *hf_more.FAMILIES.values(), *sequences.FAMILIES.values()]
    return {family.model: family for family in reversed(listed)}


def names() -> dict[str, str]:
    """The names of all classes with a head -> their model type, then those without one; the newest kinds first."""
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "CTC")
    tables = sorted(n for n in dir(modeling_auto) if re.fullmatch(r"MODEL(_FOR_\w+)?_MAPPING_NAMES", n))
    first = [f"MODEL_FOR_{kind}_MAPPING_NAMES" for kind in kinds]
    tables = first + [t for t in tables if t not in first and t != "MODEL_MAPPING_NAMES"] + ["MODEL_MAPPING_NAMES"]
    found: dict[str, str] = {}
    for table in tables:
        for kind, classes_of in getattr(modeling_auto, table).items():
            for name in (classes_of,) if isinstance(classes_of, str) else classes_of:
                found.setdefault(name, kind)
    return found


def build(name: str) -> Built:
    """A class of transformers, in train mode and float64, and one global batch. Raises what its own code raises."""
    import transformers

    if (family := rows().get(name)) is not None:
        return build_row(family)
    with mock.patch("torch.jit.script", lambda function: function):
        model_class: Any = getattr(transformers, name)
    errors: list[Exception] = []
    start = time.process_time()
    for config in hf_configs.ways(model_class.config_class, _like(model_class)):
        if errors and (isinstance(errors[-1], ImportError) or time.process_time() - start > SECONDS):
            break
        try:
            model = _model(model_class, config())
        except Exception as e:
            errors.append(e)
            continue
        for of in hf_batches.ways(model):
            try:
                return model, _fitting(model, of)
            except Exception as e:
                errors.append(e)
    raise errors[0]


def _like(model_class: Any) -> Family | None:
    """The row of a class with the same config."""
    import transformers

    same = (
        family
        for name, family in rows().items()
        if getattr(transformers, name).config_class is model_class.config_class
    )
    return next(same, None)


def _model(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters with few layers")
    return ready(model_class(config), torch.float64)


def _fitting(model: Any, of: Batch) -> Batch:
    """The batch, or what the model's own error makes of it, if the model runs and something that it gives has a
    gradient.
    """
    given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in of.items()}
    try:
        output = model(**given)
    except Exception as e:
        if (better := hf_batches.mended(model, given, e)) is None:
            raise
        return _fitting(model, better)
    loss = getattr(output, "loss", None)
    learned = [
        x for x in pytree.tree_leaves(output if loss is None else loss) if isinstance(x, Tensor) and x.requires_grad
    ]
    if not learned:
        raise ValueError("nothing that the model gives has a gradient")
    if not all(x.isfinite().all() for x in (learned if loss is None else [loss])):
        raise ValueError("what the model gives is not finite")
    return given
