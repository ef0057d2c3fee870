"""torchaudio, and other models of sound."""

from __future__ import annotations

from typing import Any

import torch

from tests.libraries import ROWS, Case, ids, reals, row


def _lengths(n: int) -> torch.Tensor:
    """Lengths of rows, the longest first: torchaudio makes its masks as long as that."""
    return torch.tensor([n - i % 3 for i in range(ROWS)])


WAV2VEC: dict[str, Any] = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 8, 4), (16, 4, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 4,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 2,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 64,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.0,
    "aux_num_out": 12,
}


def _audio(name: str, batch: Any, *args: Any, **settings: Any) -> Case:
    return row(f"torchaudio.models:{name}", batch, *args, **settings)


CASES = {
    "torchaudio conformer": _audio(
        "Conformer",
        lambda: (reals(16, 32), _lengths(16)),
        input_dim=32,
        num_heads=4,
        ffn_dim=64,
        num_layers=2,
        depthwise_conv_kernel_size=3,
    ),
    "torchaudio conformer, group norm": _audio(
        "Conformer",
        lambda: (reals(16, 32), torch.full((ROWS,), 16)),
        input_dim=32,
        num_heads=4,
        ffn_dim=64,
        num_layers=2,
        depthwise_conv_kernel_size=3,
        use_group_norm=True,
        convolution_first=True,
    ),
    "torchaudio conv-tasnet": _audio(
        "ConvTasNet",
        lambda: (reals(1, 64),),
        enc_num_feats=16,
        msk_num_feats=16,
        msk_num_hidden_feats=16,
        msk_num_layers=2,
        msk_num_stacks=1,
    ),
    "torchaudio deepspeech": _audio("DeepSpeech", lambda: (reals(1, 16, 20),), 20, n_hidden=32, n_class=12),
    "torchaudio emformer": _audio(
        "Emformer",
        lambda: (reals(10, 32), torch.full((ROWS,), 8)),
        32,
        4,
        64,
        2,
        segment_length=4,
        right_context_length=2,
        left_context_length=2,
    ),
    "torchaudio wav2letter": _audio("Wav2Letter", lambda: (reals(8, 64),), 12, "mfcc", 8),
    "torchaudio wavernn": _audio(
        "WaveRNN",
        lambda: (reals(1, 30), reals(1, 8, 7, seed=5)),
        [2, 3],
        8,
        6,
        n_res_block=1,
        n_rnn=16,
        n_fc=16,
        kernel_size=3,
        n_freq=8,
        n_hidden=8,
        n_output=8,
    ),
    "torchaudio wav2vec2": _audio("wav2vec2_model", lambda: (reals(400),), **WAV2VEC),
    "torchaudio wav2vec2, layer norms": _audio(
        "wav2vec2_model",
        lambda: (reals(400),),
        **WAV2VEC | {"extractor_mode": "layer_norm", "encoder_layer_norm_first": True},
    ),
    "torchaudio wavlm": _audio(
        "wavlm_model",
        lambda: (reals(400),),
        encoder_num_buckets=8,
        encoder_max_distance=16,
        **WAV2VEC,
    ),
    "torchaudio hdemucs": _audio("HDemucs", lambda: (reals(2, 2048),), ["a", "b"], channels=4, nfft=256, depth=3),
    "torchaudio squim": _audio(
        "squim_objective_model",
        lambda: (reals(640),),
        feat_dim=16,
        win_len=16,
        d_model=16,
        nhead=4,
        hidden_dim=16,
        num_blocks=1,
        rnn_type="LSTM",
        chunk_size=7,
    ),
    "torchaudio tacotron2": _audio(
        "Tacotron2",
        lambda: (ids(12, 8), torch.full((ROWS,), 8), reals(8, 6, seed=5), torch.full((ROWS,), 6)),
        n_mels=8,
        n_symbol=12,
        symbol_embedding_dim=16,
        encoder_embedding_dim=16,
        decoder_rnn_dim=16,
        attention_rnn_dim=16,
        attention_hidden_dim=8,
        prenet_dim=8,
        postnet_embedding_dim=16,
        encoder_n_convolution=1,
        attention_location_n_filter=4,
        attention_location_kernel_size=3,
        postnet_n_convolution=2,
    ),
    "conformer": row(
        "conformer:Conformer", lambda: (reals(16, 32),), dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=3
    ),
}
