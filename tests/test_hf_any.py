"""The rules of tests/zoo/hf_any.py: a class of each kind gets a model and a batch that its own code runs."""

from __future__ import annotations

import pytest
import torch

from tests import zoo
from tests.bench.families import default_or_waves
from tests.zoo import hf_any
from tests.zoo.hf_configs import IMAGE_TOKEN

#: Class -> the shape of its ids, or pixels, and how many places of images it has.
CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "BertForMultipleChoice": ((8, 2, 16), 0),
    "AyaVisionForConditionalGeneration": ((8, 20), 32),  # as many places before the text as its error names
    "GotOcr2ForConditionalGeneration": ((8, 16), 8),  # fewer places than the rules gave
    "Qwen2VLForConditionalGeneration": ((8, 16), 0),  # sections of a rotation that fit a small head
    "GPTNeoForQuestionAnswering": ((8, 16), 0),  # the config of another class's row
    "BartForSequenceClassification": ((8, 16), 0),  # one end in each text
    "FocalNetModel": ((8, 3, 32, 32), 0),  # widths and depths of each stage
    "HubertForCTC": ((8, 5210), 0),  # more frames than labels
    "LxmertModel": ((8, 16), 0),  # an argument that its error names
}


@pytest.mark.parametrize("name", CASES)
def test_a_class_is_built(name: str) -> None:
    with zoo.Wide():
        model, batch = hf_any.build(name)
        loss = default_or_waves(model(**batch), batch)
        again = default_or_waves(model(**batch), batch)
    shape, images = CASES[name]
    first = next(batch[k] for k in ("input_ids", "pixel_values", "input_values") if k in batch)
    assert tuple(first.shape) == shape
    assert int((first == IMAGE_TOKEN).sum()) == images
    assert torch.isfinite(loss)
    assert loss.requires_grad
    assert loss.dtype == torch.float64
    assert torch.equal(loss, again)  # nothing is drawn at random
