"""Writes through views: the graph is functional and equal to eager (capture proves it), mostly in one trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardc.capture import capture
from shardc.capture.rewrite import functional_twins
from shardc.capture.rewrite.functional_twins import is_inplace

X = torch.linspace(-1, 1, 24).view(4, 6)


class Net(nn.Module):
    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(6, 6), function
        self.register_buffer("seen", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.fc(x))


def shifted(s: Net, y: Tensor) -> Tensor:
    """What decoders do to labels."""
    z = y.new_zeros(4, 6)
    z[:, 1:] = y[:, :-1].clone()
    z[:, 0] = 2.0
    return (z * y).sum()


def overlapping(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    row, column = z[0], z[:, 2]
    row.mul_(3)
    column += 1
    row += 0.5
    return (z * z).sum() + (row * column.sum()).sum()


def transposed(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    z.t()[2:4].add_(y.t()[2:4])
    part = z.permute(1, 0)[1]
    part.copy_(y[:, 0])
    z.transpose(0, 1).mul_(2)
    return (z * part.sum()).sum()


def reshaped(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    z.view(-1)[3:9].fill_(0.5)
    z.unsqueeze(0).squeeze(0).mul_(2)
    return (z * y).sum()


def kept(s: Net, y: Tensor) -> Tensor:
    """A queue: parts of a buffer are written under no_grad, and read afterwards."""
    with torch.no_grad():
        s.seen[1:3] = y[:2] * 0.5
        s.seen[0].mul_(2).add_(1)
    return (s.seen * y).sum()


def seen_by_views(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    v, read = z[1], z[0]
    z.mul_(2)
    z[2:] = 0.0
    return (v * z).sum() + (read * 2).sum()


def diagonal(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    torch.diagonal(z[:4, :4]).fill_(1.0)
    return z.square().sum()


def masked(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    z[z > 0.2] = 0.0
    z[1:3][:, 0] += y[0, 0]
    return z.square().sum()


def recurrent(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    for t in range(1, 6):
        z[:, t] = z[:, t - 1] * 0.5 + 1
    return z.square().sum()


def expanded(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    wide = z[:, 0:1].expand(4, 3)
    z[0, 0] = 5.0
    return (z[:, :3] * wide).sum()


def view_or_copy(s: Net, y: Tensor) -> Tensor:
    """No gradient reaches what is written under no_grad in a second trace either."""
    z = y * 1
    flat = z.reshape(24)
    flat.add_(1)
    with torch.no_grad():
        s.seen.reshape(24)[:5].copy_(y.reshape(24)[:5])
    return (z * flat.view(4, 6) * (s.seen + 1)).sum()


def out(s: Net, y: Tensor) -> Tensor:
    z, total = torch.empty(4, 6), torch.empty(6)
    torch.mul(y.detach(), 2, out=z)
    torch.sum(y.detach(), 0, out=total)
    with torch.no_grad():
        torch.add(s.seen, 1, out=s.seen)
    return (y * z * total * s.seen).sum()


ONCE = [shifted, overlapping, transposed, reshaped, kept, seen_by_views, diagonal, masked, recurrent, expanded]
TWICE = [view_or_copy, out]


@pytest.mark.parametrize("function", [*ONCE, *TWICE])
def test_the_graph_is_functional(function: Callable[[Net, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    if function in ONCE:
        monkeypatch.setattr(functional_twins, "differentiable_copies", None)  # called after a second trace
    torch.manual_seed(0)
    program = capture(Net(function), X)
    assert not [n for n in program.graph.nodes if is_inplace(n)]
    assert [b.updated for b in program.buffers if b.fqn == "seen"] == [function in (kept, view_or_copy, out)]
