"""Models of time series: gluonts, iTransformer, nbeats-pytorch, pytorch-tcn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.libraries import Case, ids, reals, row

PAST, FUTURE = 24, 8


def _past(n: int = PAST) -> tuple[Tensor, ...]:
    """Values, and that all of them were observed."""
    return reals(n), torch.ones(8, n, dtype=torch.float64)


def _gluonts(path: str, batch: Any = _past, **settings: Any) -> Case:
    return row(
        f"gluonts.torch.model.{path}", batch, **{"prediction_length": FUTURE, "context_length": PAST, **settings}
    )


ENCODER: dict[str, Any] = {
    "d_model": 32,
    "nhead": 4,
    "dim_feedforward": 64,
    "dropout": 0.0,
    "activation": "relu",
    "norm_first": False,
    "num_encoder_layers": 2,
    "scaling": "mean",
}
I_TRANSFORMER: dict[str, Any] = {
    "num_variates": 8,
    "lookback_len": 16,
    "depth": 2,
    "dim": 32,
    "pred_length": (4, 8),
    "dim_head": 8,
    "heads": 4,
}
CASES = {
    "gluonts simple feedforward": _gluonts(
        "simple_feedforward.module:SimpleFeedForwardModel", lambda: (reals(PAST),), hidden_dimensions=[16, 16]
    ),
    "gluonts dlinear": _gluonts("d_linear.module:DLinearModel", hidden_dimension=16, kernel_size=5),
    "gluonts patchtst": _gluonts(
        "patch_tst.module:PatchTSTModel", patch_len=8, stride=4, padding_patch="end", num_feat_dynamic_real=0, **ENCODER
    ),
    "gluonts lagtst": _gluonts(
        "lag_tst.module:LagTSTModel", lambda: _past(PAST + 4), freq="h", lags_seq=[1, 2, 4], **ENCODER
    ),
    "gluonts itransformer": _gluonts(
        "i_transformer.module:ITransformerModel",
        lambda: (reals(PAST, 4), torch.ones(8, PAST, 4, dtype=torch.float64)),
        **ENCODER,
    ),
    "gluonts tide": _gluonts(
        "tide.module:TiDEModel",
        lambda: (reals(1), ids(4, 1), reals(PAST, 2, seed=5), *_past(), reals(FUTURE, 2, seed=6)),
        num_feat_dynamic_real=2,
        num_feat_dynamic_proj=2,
        num_feat_static_real=1,
        num_feat_static_cat=1,
        cardinality=[4],
        embedding_dimension=[4],
        feat_proj_hidden_dim=8,
        encoder_hidden_dim=16,
        decoder_hidden_dim=16,
        temporal_hidden_dim=16,
        distr_hidden_dim=8,
        decoder_output_dim=8,
        dropout_rate=0.0,
        num_layers_encoder=1,
        num_layers_decoder=1,
        layer_norm=True,
        scaling="mean",
        distr_output="@gluonts.torch.distributions:StudentTOutput()",
    ),
    "gluonts tft": _gluonts(
        "tft.module:TemporalFusionTransformerModel",
        lambda: (*_past(), reals(1), ids(4, 1), reals(PAST + FUTURE, 2, seed=5)),
        d_feat_static_real=[1],
        c_feat_static_cat=[4],
        d_feat_dynamic_real=[2],
        num_heads=4,
        d_hidden=16,
        d_var=16,
        dropout_rate=0.0,
    ),
    "itransformer": row("iTransformer:iTransformer", lambda: (reals(16, 8),), **I_TRANSFORMER),
    "itransformer, instance norm": row(
        "iTransformer:iTransformer", lambda: (reals(16, 8),), **I_TRANSFORMER, use_reversible_instance_norm=True
    ),
    "itransformer 2d": row("iTransformer:iTransformer2D", lambda: (reals(16, 8),), **I_TRANSFORMER, num_time_tokens=4),
    "itransformer fft": row("iTransformer:iTransformerFFT", lambda: (reals(16, 8),), **I_TRANSFORMER),
    "nbeats-pytorch": row(
        "nbeats_pytorch.model:NBeatsNet",
        lambda: (reals(16),),
        backcast_length=16,
        forecast_length=8,
        hidden_layer_units=16,
    ),
    "nbeats-pytorch generic": row(
        "nbeats_pytorch.model:NBeatsNet",
        lambda: (reals(16),),
        stack_types=("generic", "generic"),
        backcast_length=16,
        forecast_length=8,
        hidden_layer_units=16,
        nb_blocks_per_stack=2,
    ),
    "pytorch-tcn": row("pytorch_tcn:TCN", lambda: (reals(8, 16),), 8, [16, 16], kernel_size=3, dropout=0.0),
    "pytorch-tcn, batch norm": row(
        "pytorch_tcn:TCN",
        lambda: (reals(8, 16),),
        8,
        [16, 16],
        kernel_size=3,
        dropout=0.0,
        use_norm="batch_norm",
        causal=False,
    ),
}
