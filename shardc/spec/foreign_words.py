"""Map words of other libraries to shardc's: hints for users who bring a config of those.

Keys and values are looked up separately, as `fp16` is a section of DeepSpeed's and a dtype of everybody's. Case, `_`,
`-` and spaces do not count.
"""

from __future__ import annotations

import re

_COLUMN, _ROW, _VOCAB, _WHOLE = "column", "row", "vocab", "replicate"
_SEQUENCE = '`activations: {"*.norm": {1: tp}}` (dim 1 of what these modules return, over tp)'
_TENSOR = "`mesh: {tp: N}` and `shard: {use: structure}`"
_PIPELINE = "`mesh: {pp: N}` and `pipeline: {axis: pp, stages: N}`"
_DATA = "`mesh: {dp: N}`"
_ZERO = "`data: {zero: N}`, 1 to 3"
_FULL = "`data: {zero: 3}`"
_EXPERTS = '`mesh: {ep: N}` and `experts: [{match: "*.experts", axis: ep}]`'
_AGAIN = '`checkpoint: [{match: "*.layers.*"}]`'
_PRECISION = "`precision: {compute: bfloat16}`"
_BATCH = "`batch: {microbatches: N}`; the size of the batch is that of batch() in the model file"
_OFFLOAD = "`data: {offload: {optimizer: cpu}}`"
_OPTIMIZER = "optimizer(params) in the model file"
_NARROW = (
    "`precision: {products: fp8-rowwise}`, which computes products of linear layers in 8 bits; weights and activations "
    "keep at least 16 bits"
)
_PRODUCTS = "`precision: {products: fp8-rowwise}`; or fp8-tensorwise, mxfp8"

#: Keys of other libraries -> shardc's.
KEYS: dict[str, str] = {
    "tensor parallel, tensor parallel size, tensor parallel degree, tensor model parallel size, tp size, tp degree, tp,"
    " model parallel, model parallel size, num model parallel, tensor": _TENSOR,
    "parallelize plan, tp plan, base model tp plan, auto tp": "`shard: {use: model}`, or patterns under `shard:`",
    "pipeline model parallel size, pipeline parallel degree, pipeline parallel size, pp size, pp degree, pp,"
    " pipeline parallel, num stages, split points, pipeline parallel split points": _PIPELINE,
    "virtual pipeline model parallel size, num layers per virtual pipeline stage, interleaved": (
        "more `stages` than ranks of the axis, and `schedule: interleaved`"
    ),
    "pipeline parallel schedule, pp schedule": "`pipeline: {schedule: 1f1b}`",
    "data parallel, data parallel size, dp size, dp degree, dp, ddp, distributed data parallel,"
    " data parallel replicate degree, dp replicate": _DATA,
    "fsdp, fsdp2, fully shard, fully sharded data parallel, fsdp config, fsdp plugin, data parallel shard degree,"
    " dp shard, sharding strategy, sharding, reshard after forward, full shard": _FULL,
    "zero, zero stage, zero optimization, stage, zero dp, deepspeed, deepspeed config": _ZERO,
    "distributed optimizer, use distributed optimizer": "`data: {zero: 1}`",
    "hsdp, hybrid shard": "`data: {axis: [dp_outer, dp], zero: 3}`",
    "offload optimizer, cpu offload, offload param, offload params, offload, zero offload": _OFFLOAD,
    "sequence parallel, sp, enable sequence parallel": _SEQUENCE,
    "context parallel, context parallel size, context parallel degree, cp, cp size, ulysses": "`sequence: {axis: cp}`",
    "expert model parallel size, expert parallel, expert parallel degree, expert parallel size, ep size, ep, moe,"
    " num experts": _EXPERTS,
    "moe expert capacity factor, capacity factor, expert capacity": "`experts: [{..., capacity: 1.25}]`",
    "activation checkpointing, activation checkpoint, gradient checkpointing, recompute, recompute granularity,"
    " recompute method, selective ac, ac, activation recomputation, remat": _AGAIN,
    "fp16, bf16, mixed precision, mp policy, mixed precision policy, amp, autocast, dtype, torch dtype, param dtype,"
    " params dtype": _PRECISION,
    "reduce dtype, grad reduce in fp32, accumulate allreduce grads in fp32": "`precision: {reduce: float32}`",
    "initial scale power, grad scaler, grad scaling": "`precision: {loss_scale: dynamic}`",
    "fp8, float8, fp8 recipe, fp8 format, float8 config, fp8 training, enable fp8, recipe name, quantize": _PRODUCTS,
    "mx, mxfp8": "`precision: {products: mxfp8}`",
    "filter fqns": '`precision: {products: {recipe: fp8-rowwise, match: ["*", "!lm_head"]}}`',
    "gradient accumulation steps, gradient accumulation, accumulate, accumulate grad batches, micro batch size,"
    " micro batches, num microbatches, train micro batch size per gpu, train batch size, global batch size,"
    " batch size, local batch size": _BATCH,
    "bucket cap mb, reduce bucket size, allgather bucket size, ddp bucket size": "`data: {bucket_mb: 25}`",
    "overlap grad reduce, overlap comm, overlap param gather": "nothing to write: they overlap",
    "gradient clipping, clip grad, clip grad norm, max norm": "`shardc run --clip 1.0`, or engine(clip_norm=1.0)",
    "lr, learning rate, weight decay, betas, momentum, optim": _OPTIMIZER,
    "muon, shampoo, soap, lamb, adafactor": "optimizer(params) in the model file, and `optimizer: {matrices: whole}`",
    "scheduler, lr scheduler": "scheduler(optimizer) in the model file",
    "world size, num gpus, num processes, nproc, nproc per node, nodes, num nodes, device mesh, mesh shape,"
    " mesh dim names, parallelism, parallel dims": "`mesh: {dp: 2, tp: 4}`: their product is the number of ranks",
    "steps, training steps, max steps": "`shardc run --steps 300`",
    "model, data set, dataset": "the model file: `shardc compile model.py spec.yaml`",
    "pad, padding": "`uneven: pad`",
}
#: Values of other libraries -> shardc's.
VALUES: dict[str, str] = {
    "colwise, col wise, column wise, col, colwise rep, colwise gather output, packed colwise, local colwise,"
    " local packed colwise, colwise parallel, column parallel, column parallel linear, qkv column parallel linear,"
    " merged column parallel linear, output": _COLUMN,
    "rowwise, row wise, rowwise rep, rowwise split input, packed rowwise, local rowwise, local packed rowwise,"
    " rowwise parallel, row parallel, row parallel linear, input": _ROW,
    "embedding rowwise, vocab parallel, vocab parallel embedding, parallel lm head, vocabulary": _VOCAB,
    "replicated, replicated linear, no parallel, none, whole, replicated with grad allreduce": _WHOLE,
    "sequence parallel, prepare module input, prepare module output": _SEQUENCE,
    "shard, shard 0": "`{0: tp}`: dim 0 over tp",
    "shard 1": "`{1: tp}`: dim 1 over tp",
    "fp8, float8, fp8 e4m3, float8 e4m3fn, fp8 e5m2, float8 e5m2, nvfp4, int8, uint8, fp4, nf4, int4": _NARROW,
    "rowwise with gw hp, axiswise": "fp8-rowwise",
    "tensorwise, tensorwise scaling, delayed": "fp8-tensorwise",
    "mxfp8 cublas, mxfp8 rceil, mxfp8 emulated": "mxfp8",
    "fp16, half, f16, 16, torch float16": "float16",
    "bf16, torch bfloat16": "bfloat16",
    "fp32, float, single, f32, full, tf32, torch float32": "float32",
    "fp64, double, f64": "float64",
    "interleaved 1f1b, interleave": "interleaved",
    "zbv, zbv zero bubble, zero bubble v": "zb-v",
    "dual pipe v, dual pipe": "dualpipe-v",
    "zero bubble, interleaved zero bubble, zb, zb1p": "zb-h1",
    "auto": "structure",
}


def ours(word: object, *, key: bool) -> str:
    """Return the spec's word or a hint for another library's word; "" if unknown. key: a key, not a value."""
    return (_KEYS if key else _VALUES).get(_plain(word), "") if isinstance(word, str) else ""


def _plain(word: str) -> str:
    return re.sub(r"[\W_]+", "", word[:80].lower())


def _by_word(table: dict[str, str]) -> dict[str, str]:
    return {_plain(word): ours for words, ours in table.items() for word in words.split(",")}


_KEYS, _VALUES = _by_word(KEYS), _by_word(VALUES)
