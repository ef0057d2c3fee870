"""What graphs.yaml calls: models of torch-geometric on fixed edges. A batch is 8 graphs of 12 nodes, or one graph."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.libraries import NODES, ROWS


def edges() -> Tensor:
    """A ring with chords, both ways, i64[2, 48]."""
    i = torch.arange(NODES)
    one = torch.stack([torch.cat([i, i]), torch.cat([(i + 1) % NODES, (i + 5) % NODES])])
    return torch.cat([one, one.flip(0)], 1)


class OnGraph(nn.Module):
    """A model of torch-geometric on the same edges in every call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("edges", edges(), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.model(x, self.edges)


class Static(nn.Module):
    """Two layers of torch-geometric, on rows that are graphs: [8, nodes, channels]."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        self.layers = nn.ModuleList([kind(8, 16, **settings), kind(16, 16, **settings)])
        self.register_buffer("edges", edges(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.edges).relu()
        return x.mean(1)


class Dense(nn.Module):
    """Two layers of torch-geometric that take a matrix of edges for each graph."""

    def __init__(self, name: str, *args: int, **settings: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        self.layers = nn.ModuleList([kind(8, 16, *args, **settings), kind(16, 16, *args, **settings)])

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, adjacency).relu()
        return x.mean(1)


class Gin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kind = importlib.import_module("torch_geometric.nn").DenseGINConv
        self.layer = kind(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.layer(x, adjacency)


class Pooled(nn.Module):
    """Graphs that are pooled to four nodes (Ying et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        nn_ = importlib.import_module("torch_geometric.nn")
        self.pool, self.embed, self.last = nn_.DenseSAGEConv(8, 4), nn_.DenseSAGEConv(8, 16), nn_.DenseSAGEConv(16, 12)

    def forward(self, x: Tensor, adjacency: Tensor) -> tuple[Tensor, ...]:
        pool = importlib.import_module("torch_geometric.nn").dense_diff_pool
        x, adjacency, link, entropy = pool(self.embed(x, adjacency), adjacency, self.pool(x, adjacency))
        return self.last(x, adjacency).mean(1), link, entropy


def bonds(pos: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of atoms of each molecule, and how far they are."""
    one = torch.combinations(torch.arange(4, device=pos.device)).T
    pairs = (torch.cat([one, one.flip(0)], 1)[:, None] + 4 * torch.arange(ROWS, device=pos.device)[:, None]).flatten(1)
    return pairs, (pos[pairs[0]] - pos[pairs[1]]).norm(dim=-1)


class Molecules(nn.Module):
    """A model of atoms in space, of 8 molecules with 4 atoms each."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.model = getattr(importlib.import_module("torch_geometric.nn.models"), name)(**settings)

    def forward(self, z: Tensor, pos: Tensor) -> Tensor:
        of = torch.arange(ROWS, device=z.device).repeat_interleave(4)
        return self.model(z.flatten(), pos.flatten(0, 1), of)
