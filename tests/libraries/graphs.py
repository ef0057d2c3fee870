"""torch-geometric and egnn-pytorch. A batch is 8 graphs of 12 nodes on the same edges, or one graph."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.libraries import ROWS, Case, ids, reals, row

NODES = 12


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


def _layers(name: str, **settings: Any) -> Case:
    """A model of torch-geometric of one graph whose nodes are the rows of the batch."""

    def make() -> nn.Module:
        model = getattr(importlib.import_module("torch_geometric.nn.models"), name)(8, 16, 2, 12, **settings)
        return OnGraph(model)

    return Case(make, lambda: (torch.cat([reals(8), reals(8, seed=5)])[:NODES],))


def _static(name: str, **settings: Any) -> Case:
    """Two layers of torch-geometric, on rows that are graphs: [8, nodes, channels]."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = getattr(importlib.import_module("torch_geometric.nn"), name)
            self.layers = nn.ModuleList([kind(8, 16, **settings), kind(16, 16, **settings)])
            self.register_buffer("edges", edges(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, self.edges).relu()
            return x.mean(1)

    return Case(Model, lambda: (reals(NODES, 8),))


def _dense(name: str, *args: int, **settings: Any) -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = getattr(importlib.import_module("torch_geometric.nn"), name)
            self.layers = nn.ModuleList([kind(8, 16, *args, **settings), kind(16, 16, *args, **settings)])

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, adjacency).relu()
            return x.mean(1)

    return Case(Model, lambda: (reals(NODES, 8), (reals(NODES, NODES, seed=5) > 0.5).double()))


class Gin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kind = importlib.import_module("torch_geometric.nn").DenseGINConv
        self.layer = kind(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.layer(x, adjacency)  # type: ignore[no-any-return]


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


def _adjacent() -> tuple[Tensor, ...]:
    return reals(NODES, 8), (reals(NODES, NODES, seed=5) > 0.5).double()


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
        return self.model(z.flatten(), pos.flatten(0, 1), of)  # type: ignore[no-any-return]


CASES = {
    "torch-geometric gcn": _layers("GCN"),
    "torch-geometric graphsage": _layers("GraphSAGE"),
    "torch-geometric gin": _layers("GIN"),
    "torch-geometric gat": _layers("GAT", heads=2),
    "torch-geometric gat v2": _layers("GAT", heads=2, v2=True),
    "torch-geometric edge cnn": _layers("EdgeCNN"),
    "torch-geometric gcn, jumping knowledge": _layers("GCN", jk="cat"),
    "torch-geometric sage, static": _static("SAGEConv"),
    "torch-geometric gcn, static": _static("GCNConv"),
    "torch-geometric graph conv, static": _static("GraphConv"),
    "torch-geometric tag, static": _static("TAGConv"),
    "torch-geometric sg, static": _static("SGConv"),
    "torch-geometric cheb, static": _static("ChebConv", K=2),
    "torch-geometric cluster gcn, static": _static("ClusterGCNConv"),
    "torch-geometric le, static": _static("LEConv"),
    "torch-geometric dense gcn": _dense("DenseGCNConv"),
    "torch-geometric dense sage": _dense("DenseSAGEConv"),
    "torch-geometric dense graph conv": _dense("DenseGraphConv"),
    "torch-geometric dense gat": _dense("DenseGATConv", heads=1),
    "torch-geometric dense gin": Case(Gin, _adjacent),
    "torch-geometric diff pool": Case(Pooled, _adjacent),
    "torch-geometric schnet": Case(
        lambda: Molecules(
            "SchNet", hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=bonds
        ),
        lambda: (ids(10, 4), reals(4, 3)),
    ),
    "torch-geometric linkx": Case(
        lambda: OnGraph(importlib.import_module("torch_geometric.nn.models").LINKX(NODES, 8, 16, 12, 2)),
        lambda: (torch.cat([reals(8), reals(8, seed=5)])[:NODES],),
    ),
    "torch-geometric mlp": row("torch_geometric.nn.models:MLP", lambda: (reals(8),), [8, 16, 16, 12], norm=None),
    "torch-geometric mlp, batch norm": row("torch_geometric.nn.models:MLP", lambda: (reals(8),), [8, 16, 16, 12]),
    "egnn-pytorch": row(
        "egnn_pytorch:EGNN_Network", lambda: (ids(8, 8), reals(8, 3)), num_tokens=8, dim=16, depth=2, m_dim=8
    ),
    "egnn-pytorch nearest": row(
        "egnn_pytorch:EGNN_Network",
        lambda: (ids(8, 8), reals(8, 3)),
        num_tokens=8,
        dim=16,
        depth=2,
        m_dim=8,
        num_nearest_neighbors=4,
    ),
    "egnn-pytorch attention": row(
        "egnn_pytorch:EGNN_Network",
        lambda: (ids(8, 8), reals(8, 3)),
        num_tokens=8,
        dim=16,
        depth=2,
        m_dim=8,
        global_linear_attn_every=1,
        global_linear_attn_heads=2,
        global_linear_attn_dim_head=8,
    ),
}
