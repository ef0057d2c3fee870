"""Tracebacks of the user's code alone."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from shardc.cli.ranks.user_frames import one_line, place, users_traceback


def test_a_schedule_that_raises_is_shown_without_torchs_frames(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\ndef scheduler(o):\n    return torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / 0)\n"
    )
    scope: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(ZeroDivisionError) as e:
        scope["scheduler"](torch.optim.SGD([torch.zeros(1, requires_grad=True)]))  # type: ignore[operator]
    error = e.value.with_traceback(e.value.__traceback__.tb_next if e.value.__traceback__ else None)  # not this test's
    text = users_traceback(error)
    assert text.startswith("Traceback of your code (--debug shows all of it):\n")
    assert text.count("  File ") == text.count(f'  File "{file}", line 3') == 2
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert place(error) == "model.py:3"
    assert "lr_scheduler.py" in users_traceback(error, debug=True)


class Rows(Dataset[float]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> float:
        return 1 / (2 - i)


def test_an_error_in_a_dataloader_of_ones_own_names_its_line() -> None:
    """torch puts the traceback of the worker process into the message."""
    with pytest.raises(ZeroDivisionError) as e:
        list(DataLoader(Rows(), num_workers=1))
    line = f"test_user_frames.py:{inspect.getsourcelines(Rows.__getitem__)[1] + 1}"
    assert place(e.value) == line
    assert one_line(e.value) == "ZeroDivisionError: division by zero (in DataLoader worker process 0)"
    text = users_traceback(e.value.with_traceback(None))
    assert text.count("  File ") == 1
    assert "return 1 / (2 - i)" in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero (in DataLoader worker process 0)")
