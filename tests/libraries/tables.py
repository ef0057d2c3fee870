"""Recommenders and models of tables: torchfm, deepctr-torch, tab-transformer-pytorch, pytorch-tabnet."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.libraries import Case, ids, reals, row

FIELDS = [12, 16, 20, 24]


def _fields() -> tuple[Tensor, ...]:
    return (torch.stack([ids(n, seed=i) for i, n in enumerate(FIELDS)], -1),)


def _fm(module: str, name: str, **settings: Any) -> Case:
    return row(f"torchfm.model.{module}:{name}", _fields, **{"field_dims": FIELDS, "embed_dim": 8, **settings})


MLP: dict[str, Any] = {"mlp_dims": (16, 16), "dropout": 0.0}
MLPS: dict[str, Any] = {"mlp_dims": (16, 16), "dropouts": (0.0, 0.0)}


def _ctr(name: str, columns: int = 2, numbers: int = 2, **settings: Any) -> Case:
    """A model of deepctr-torch on four categories and some numbers. columns: how many lists of features it takes."""

    def make() -> nn.Module:
        inputs = importlib.import_module("deepctr_torch.inputs")
        features = [inputs.SparseFeat(f"c{i}", n, embedding_dim=8) for i, n in enumerate(FIELDS)]
        features += [inputs.DenseFeat(f"n{i}", 1) for i in range(numbers)]
        model: nn.Module = getattr(importlib.import_module("deepctr_torch.models"), name)(
            *[features] * columns, device="cpu", **settings
        )
        return model

    return Case(make, lambda: (torch.cat([_fields()[0].double(), reals(numbers)], -1),))


HIDDEN: dict[str, Any] = {"dnn_hidden_units": (16, 16)}
TAB: dict[str, Any] = {
    "categories": tuple(FIELDS),
    "num_continuous": 4,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "dim_head": 8,
}
CASES = {
    "torchfm afi": _fm(
        "afi",
        "AutomaticFeatureInteractionModel",
        atten_embed_dim=16,
        num_heads=2,
        num_layers=2,
        mlp_dims=(16,),
        dropouts=(0.0, 0.0, 0.0),
    ),
    "torchfm afm": _fm("afm", "AttentionalFactorizationMachineModel", attn_size=8, dropouts=(0.0, 0.0)),
    "torchfm afn": _fm("afn", "AdaptiveFactorizationNetwork", LNN_dim=16, **MLPS),
    "torchfm dcn": _fm("dcn", "DeepCrossNetworkModel", num_layers=2, **MLP),
    "torchfm deepfm": _fm("dfm", "DeepFactorizationMachineModel", **MLP),
    "torchfm ffm": _fm("ffm", "FieldAwareFactorizationMachineModel"),
    "torchfm fm": _fm("fm", "FactorizationMachineModel"),
    "torchfm fnfm": _fm("fnfm", "FieldAwareNeuralFactorizationMachineModel", **MLPS),
    "torchfm fnn": _fm("fnn", "FactorizationSupportedNeuralNetworkModel", **MLP),
    "torchfm lr": row("torchfm.model.lr:LogisticRegressionModel", _fields, field_dims=FIELDS),
    "torchfm ncf": _fm(
        "ncf",
        "NeuralCollaborativeFiltering",
        user_field_idx=torch.tensor([0]).numpy(),
        item_field_idx=torch.tensor([1]).numpy(),
        **MLP,
    ),
    "torchfm nfm": _fm("nfm", "NeuralFactorizationMachineModel", **MLPS),
    "torchfm pnn": _fm("pnn", "ProductNeuralNetworkModel", **MLP),
    "torchfm pnn, outer": _fm("pnn", "ProductNeuralNetworkModel", method="outer", **MLP),
    "torchfm wide and deep": _fm("wd", "WideAndDeepModel", **MLP),
    "torchfm xdeepfm": _fm(
        "xdfm", "ExtremeDeepFactorizationMachineModel", cross_layer_sizes=(8, 8), split_half=False, **MLP
    ),
    "deepctr-torch autoint": _ctr("AutoInt", **HIDDEN),
    "deepctr-torch dcn": _ctr("DCN", **HIDDEN),
    "deepctr-torch dcn, matrix": _ctr("DCN", cross_parameterization="matrix", **HIDDEN),
    "deepctr-torch dcn mix": _ctr("DCNMix", low_rank=4, num_experts=2, **HIDDEN),
    "deepctr-torch deepfm": _ctr("DeepFM", **HIDDEN),
    "deepctr-torch wdl": _ctr("WDL", **HIDDEN),
    "deepctr-torch afm": _ctr("AFM", numbers=0),
    "deepctr-torch nfm": _ctr("NFM", **HIDDEN),
    "deepctr-torch fibinet": _ctr("FiBiNET", **HIDDEN),
    "deepctr-torch xdeepfm": _ctr("xDeepFM", cin_layer_size=(8, 8), **HIDDEN),
    "deepctr-torch pnn": _ctr("PNN", columns=1, **HIDDEN),
    "deepctr-torch difm": _ctr("DIFM", att_head_num=2, **HIDDEN),
    "deepctr-torch ifm": _ctr("IFM", **HIDDEN),
    "deepctr-torch onn": _ctr("ONN", **HIDDEN),
    "deepctr-torch afn": _ctr("AFN", ltl_hidden_size=16, afn_dnn_hidden_units=(16, 16)),
    "deepctr-torch ccpm": _ctr("CCPM", numbers=0, **HIDDEN),
    "deepctr-torch mlr": _ctr("MLR", columns=1),
    "tab-transformer-pytorch": row(
        "tab_transformer_pytorch:TabTransformer", lambda: (*_fields(), reals(4)), **TAB, mlp_act="@torch.nn:ReLU()"
    ),
    "tab-transformer-pytorch ft": row("tab_transformer_pytorch:FTTransformer", lambda: (*_fields(), reals(4)), **TAB),
    "pytorch-tabnet": row(
        "pytorch_tabnet.tab_network:TabNet",
        lambda: (reals(8),),
        8,
        4,
        n_d=8,
        n_a=8,
        n_steps=2,
        virtual_batch_size=8,
        group_attention_matrix=torch.eye(8, dtype=torch.float64),
    ),
}
