"""What a loss is divided by, how gradients of microbatches add up, tied weights, stages."""

from __future__ import annotations

from tests.verify.field_bugs.bug import MICRO, MICRO4, PIPE, VOCAB, Bug, on, zero

LOSSES = [
    Bug(
        "huggingface/transformers issues 34242",
        "the loss was averaged per rank and then over ranks, though ranks had different numbers of labels",
        "lm",
        on("dp=2"),
        mutant="collective dropped",
    ),
    Bug(
        "pytorch/torchtitan issues 1842",
        "each rank divided by its own number of valid tokens, and FSDP averaged the gradients",
        "lm",
        on("dp=2", **zero(3)),
    ),
    Bug(
        "PrimeIntellect-ai/prime-rl pull 1960",
        "masked prompt tokens lie on the first ranks of a split sequence: their few labels weighed more",
        "lm",
        on("cp=2", sequence={"axis": "cp"}),
    ),
    Bug(
        "PrimeIntellect-ai/prime-rl pull 2562",
        "each data rank divided by its own count of tokens that are in the loss, in each of its microbatches",
        "lm",
        on("dp=2 cp=2", sequence={"axis": "cp"}, **MICRO),
    ),
    Bug(
        "ml-explore/mlx-lm pull 1413",
        "accumulation averaged the means of microbatches with different numbers of tokens",
        "lm",
        on("dp=1", **MICRO4),
    ),
    Bug(
        "huggingface/transformers pull 35438",
        "the number of labels of all accumulated batches did not reach the loss: it was scaled wrong",
        "lm",
        on("dp=2", **MICRO),
        mutant="sum over microbatches of another value",
    ),
    Bug(
        "ByteDance-Seed/VeOmni pull 963",
        "the accumulated gradient was as many times too large as there were microbatches",
        "layers",
        on("dp=2", **MICRO4),
        mutant="constant changed",
    ),
    Bug(
        "verl-project/verl pull 3332",
        "the loss was divided after its backward, where that changes nothing",
        "lm",
        on("dp=1", **MICRO),
    ),
    Bug(
        "NVIDIA-NeMo/Speech issues 8343",
        "the loss depended on the size of a microbatch",
        "lm",
        on("dp=2", batch={"rows": 1}),
        mutant="microbatches cut otherwise",
    ),
    Bug(
        "pytorch/torchtitan issues 1733",
        "a pipeline divided all that was accumulated so far by its microbatches at every accumulation step",
        "two layers",
        on("pp=2", pipeline={"axis": "pp", "stages": 2, "schedule": "gpipe"}, **MICRO4),
    ),
    Bug(
        "pytorch/torchtitan issues 2972",
        "with a pipeline the loss was normalised after its backward, for the log only",
        "two layers",
        on("pp=2 dp=2", **PIPE),
    ),
    Bug(
        "areal-project/AReaL pull 1273",
        "the schedule divided a loss by its microbatches that was normalised already",
        "two layers",
        on("pp=2", **PIPE),
        mutant="sum over microbatches of another value",
    ),
    Bug(
        "NVIDIA/Megatron-LM pull 4070",
        "an auxiliary loss was added in full by every microbatch",
        "experts",
        on("dp=2", **MICRO),
    ),
    Bug(
        "NVIDIA/Megatron-LM issues 7452",
        "multi-token prediction was normalised by counts of one rank, which differ for the shifted labels",
        "next tokens",
        on("dp=2", **MICRO),
    ),
    Bug(
        "huggingface/transformers pull 36607",
        "each rank of a split sequence shifted its own labels: the last token of each lost its target",
        "shifting",
        on("cp=2", sequence={"axis": "cp"}),
        mutant="collective along another dim",
    ),
    Bug(
        "huggingface/transformers pull 48493",
        "models dropped the labels that were shifted before the sequence was split, and shifted again",
        "shifting",
        on("dp=2 cp=2", sequence={"axis": "cp", "method": "ulysses"}),
    ),
    Bug(
        "NVIDIA/Megatron-LM issues 7464",
        "label smoothing over a split vocabulary took the size and the mean of one rank's part",
        "label smoothing",
        on("tp=2", **VOCAB),
    ),
    Bug(
        "modelscope/ms-swift pull 9947",
        "log-probabilities picked from a split vocabulary had no gradient from the other ranks",
        "gathered log-probabilities",
        on("tp=2", **VOCAB),
    ),
    Bug(
        "apple/ml-cross-entropy pull 42",
        "the loss of a split vocabulary returned the hidden states' gradient as one rank's summand",
        "lm",
        on("tp=2", **VOCAB),
        mutant="collective dropped",
    ),
    Bug(
        "mlfoundations/open_clip issues 616",
        "gathering with gradients multiplied those of a contrastive loss by the number of ranks",
        "towers",
        on("dp=2"),
        mutant="collective replaced by another",
    ),
    Bug(
        "facebookresearch/SLIP issues 31",
        "the contrastive loss gathered the other ranks' rows without their gradient",
        "towers",
        on("dp=4"),
        mutant="collective dropped",
    ),
    Bug(
        "huggingface/sentence-transformers issues 2916",
        "accumulation does not make the batch of a contrastive loss larger: each part sees its own negatives",
        "towers",
        on("dp=2", **MICRO),
        "refused: takes all rows of the batch",
    ),
]

ACCUMULATION = [
    Bug(
        "allenai/open-instruct pull 1498",
        "ZeRO 2 kept the gradient of the last microbatch only",
        "lm",
        on("dp=2", **zero(2), **MICRO4),
        mutant="gradient in no bucket",
    ),
    Bug(
        "deepspeedai/DeepSpeed pull 6550",
        "ZeRO 2 with an offloaded optimizer overwrote gradients that it should have added up",
        "lm",
        on("dp=2", **zero(2, offload={"optimizer": "cpu"}), **MICRO4),
    ),
    Bug(
        "deepspeedai/DeepSpeed issues 7718",
        "after an upgrade the gradients of ZeRO 2 were a third of those of ZeRO 3",
        "lm",
        on("dp=4", **zero(2)),
        clip=0.05,
    ),
    Bug(
        "deepspeedai/DeepSpeed pull 545",
        "ZeRO 2 with accumulation broke where some parameters had no gradient in a microbatch",
        "an idle expert",
        on("dp=2", **zero(2), **MICRO4),
    ),
    Bug(
        "deepspeedai/DeepSpeed issues 1488",
        "with accumulation the loss depended on the stage of ZeRO",
        "lm",
        on("dp=2", **zero(1), **MICRO4),
    ),
    Bug(
        "hpcaitech/ColossalAI issues 247",
        "gradients were reduced again after every microbatch, with what was reduced before in them",
        "lm",
        on("dp=2", **zero(3), **MICRO4),
        mutant="gradient in two buckets",
    ),
    Bug(
        "InfiniTensor/InfiniTrain pull 213",
        "with overlap, ZeRO 2 reduced after the first microbatch and left the others out",
        "two layers",
        on("dp=2", **zero(2), **MICRO),
        mutant="gradient in no bucket",
    ),
    Bug(
        "deepspeedai/DeepSpeed pull 7805",
        "two buffers took turns in holding a bucket, and the turn was reset too early: gradients were overwritten",
        "two layers",
        on("dp=2", **zero(2, bucket_mb=0.0005)),
        mutant="gradient in two buckets",
    ),
    Bug(
        "deepspeedai/DeepSpeed issues 6351",
        "whether training converged depended on the size of the buckets",
        "two layers",
        on("dp=2", **zero(1, bucket_mb=0.0001)),
        mutant="gradient in no bucket",
    ),
]

TIED = [
    Bug(
        "uw-syfi/piper issues 13",
        "a tied embedding on the first and the last stage was two parameters, each with half of the gradient",
        "tied",
        on("pp=2", **PIPE),
        mutant="gradient not summed",
    ),
    Bug(
        "pytorch/pytorch issues 180952",
        "with weights' gradients in a pass of their own, a weight that is used twice got its gradient twice",
        "a weight used twice",
        on("pp=2", pipeline={"axis": "pp", "cut": "last", "schedule": "zb-h1"}, **MICRO),
    ),
    Bug(
        "NVIDIA-NeMo/Automodel pull 3530",
        "stages were set up again between microbatches, and forgot the gradients so far",
        "two layers",
        on("pp=2", pipeline={"axis": "pp", "stages": 2, "schedule": "1f1b"}, **MICRO4),
    ),
    Bug(
        "NVIDIA/Megatron-LM pull 6500",
        "copies of a tied embedding lay at different offsets of the stages' flat buffers, and were summed as they lay",
        "tied",
        on("pp=2 dp=2", **PIPE, **zero(1)),
    ),
]
