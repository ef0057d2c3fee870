"""List which ops run in which precision: torch.autocast's lists, by op name, and others.

Source: torch 2.13, aten/src/ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE), described under "Autocast Op Reference" at https://docs.pytorch.org/docs/stable/amp.html.
Ops of no list follow their operands.
"""

from __future__ import annotations

from shardc.passes.canonical.batch_norm import BATCH_NORMS


def _of(names: str, *more: str) -> frozenset[str]:
    return frozenset((*names.split(), *more))


#: Run in the compute dtype: products, and ops that consist of them.
LOW = _of(
    # AT_FORALL_LOWER_PRECISION_FP
    """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
    # products that autocast sees as the ops above, or promotes
    """
    linalg_matmul dot vdot inner outer ger tensordot bilinear _trilinear _grouped_mm experts lstm gru rnn_tanh
    rnn_relu
    """
)

#: Operands of LOW ops that keep their dtype: weights of experts' results, which are added up in it.
STAY = {"experts": (2,)}

#: Look-ups: the table is read as it is stored, so that its gradient adds up in that dtype; the result is cast.
LOOKUPS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})

#: Run in float32: sums of many elements, statistics, losses, exponentials and logarithms.
WIDE = _of(
    # AT_FORALL_FP32
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
    # AT_FORALL_FP32_SET_OPT_DTYPE and _APPEND_DTYPE
    """
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm
    """
    # the same ops under their other names
    """
    _softmax _log_softmax special_softmax special_log_softmax special_logsumexp _fused_rms_norm native_group_norm
    nll_loss_nd nll_loss_forward nll_loss2d_forward float_power square exp2 special_expm1 special_log1p special_exp2
    special_erfinv
    """
    # means and statistics, which autocast leaves to kernels that add in float32 (over several ranks no kernel
    # does), and other losses
    """
    mean nanmean nansum var std var_mean std_mean instance_norm adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d _weight_norm _weight_norm_interface logcumsumexp
    logaddexp logaddexp2 log_sigmoid log_sigmoid_forward cross_entropy_loss binary_cross_entropy ctc_loss _ctc_loss
    trace digamma lgamma polygamma erfc special_erfcx quantile nanquantile cov corrcoef avg_pool3d
    """
    # no kernels in 16 bits (autocast's CPU list, autocast_mode.cpp)
    """
    max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d adaptive_max_pool3d fractional_max_pool2d
    fractional_max_pool3d cholesky_inverse cholesky_solve lu_solve orgqr ormqr pinverse geqrf qr svd triangular_solve
    _lu_with_info view_as_complex complex polar stft istft cholesky inverse det logdet slogdet histc grid_sampler
    grid_sampler_2d grid_sampler_3d affine_grid_generator fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine
    """,
    *BATCH_NORMS,
)
WIDE_PREFIXES = ("linalg_", "fft_", "special_bessel", "special_modified")

#: WIDE ops that return an activation of their operand's shape, which is then cast to the compute dtype.
NARROWED = _of(
    """
    layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm instance_norm
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool3d
    max_pool3d adaptive_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine
    """,
    *BATCH_NORMS,
    *(n for n in WIDE if "upsample_" in n),
)

#: Move elements and compute nothing: the result has the properties of the operand.
MOVES = _of(
    """
    getitem reshape view _unsafe_view _reshape_alias view_as flatten unflatten transpose t permute movedim moveaxis
    swapaxes swapdims numpy_T matrix_H mT unsqueeze squeeze expand expand_as broadcast_to slice select narrow split
    split_with_sizes chunk tensor_split unbind unsafe_split unsafe_split_with_sizes unsafe_chunk detach alias clone
    contiguous lift_fresh lift_fresh_copy repeat tile repeat_interleave flip roll index_select index gather take
    take_along_dim diagonal unfold as_strided pixel_shuffle pixel_unshuffle channel_shuffle tril triu constant_pad_nd
    pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d view_as_real atleast_1d atleast_2d
    atleast_3d
    """
)

#: Casts that the model itself has.
CASTS = frozenset({"to", "_to_copy", "type_as", "_to_cpu"})

#: Take operands of several floating dtypes and compute in the widest; other ops get operands of one dtype
#: (autocast's promote list).
PROMOTE = _of(
    """
    add sub mul div true_divide rsub where cat stack concat hstack vstack dstack maximum minimum fmax fmin atan2
    arctan2 remainder fmod floor_divide hypot copysign addcmul addcdiv clamp clamp_min clamp_max eq ne lt le gt ge
    xlogy nextafter logical_and logical_or logical_xor zeros_like ones_like full_like empty_like
    """
)


def is_wide(name: str) -> bool:
    return name in WIDE or (name.startswith(WIDE_PREFIXES) and name not in LOW)
