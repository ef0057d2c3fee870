"""Tracebacks of the user's code alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardc
from shardc.cli.user_frames import is_users, place, print_error
from shardc.runtime import launch


def test_whose_code_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    assert is_users(tmp_path / "model.py")
    assert not any(is_users(x) for x in (torch.__file__, shardc.__file__, launch.__file__, pytest.__file__, "<string>"))


def test_a_schedule_that_raises_is_shown_without_torchs_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\ndef scheduler(o):\n    return torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / 0)\n"
    )
    scope: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(ZeroDivisionError) as e:
        scope["scheduler"](torch.optim.SGD([torch.zeros(1, requires_grad=True)]))  # type: ignore[operator]
    error = e.value.with_traceback(e.value.__traceback__.tb_next if e.value.__traceback__ else None)  # not this test's
    print_error(error, debug=False)
    said = capsys.readouterr().err
    assert said.startswith("Traceback of your code (--debug shows all of it):\n")
    assert said.count("  File ") == said.count(f'  File "{file}", line 3') == 2
    assert said.endswith("ZeroDivisionError: division by zero\n")
    assert place(error) == "model.py:3"
    print_error(error, debug=True)
    assert "lr_scheduler.py" in capsys.readouterr().err
