"""What comes after the gradients: clipping, optimizers, buffers, the order of data."""

from __future__ import annotations

from tests.verify.field_bugs.bug import EXPERTS, MICRO, PIPE, Bug, on, zero

CLIPPING = [
    Bug(
        "pytorch/pytorch issues 72548",
        "torch's clip_grad_norm_ on sharded parameters took the norm of one rank's part",
        "lm",
        on("dp=2", **zero(3)),
        clip=0.05,
    ),
    Bug(
        "pytorch/pytorch pull 88955",
        "the norm counted every gradient that ranks have copies of once for each rank",
        "lm",
        on("dp=2"),
        clip=0.05,
    ),
    Bug(
        "pytorch/torchtitan issues 596",
        "each stage of a pipeline clipped by its own norm",
        "two layers",
        on("pp=2", **PIPE),
        clip=0.05,
    ),
    Bug(
        "NVIDIA-NeMo/RL pull 3788",
        "what tensor ranks have copies of was counted once for each of them",
        "qk norm",
        on("dp=2 tp=2"),
        clip=0.05,
    ),
    Bug(
        "hpcaitech/ColossalAI issues 2192",
        "the norm left out the experts of other ranks",
        "experts",
        on("ep=2", **EXPERTS),
        clip=0.05,
    ),
    Bug(
        "NVIDIA-NeMo/Automodel issues 3816",
        "each group of expert ranks clipped the layers that they share by another factor",
        "experts",
        on("dp=2 ep=2", **EXPERTS),
        clip=0.05,
    ),
    Bug(
        "NVIDIA/Megatron-LM pull 5916",
        "with expert and tensor parallel together the norm left out some experts",
        "experts",
        on("ep=2 tp=2", **EXPERTS),
        clip=0.05,
    ),
    Bug(
        "deepspeedai/DeepSpeed pull 8478",
        "norms of ranks with different experts were averaged",
        "experts",
        on("ep=4", **EXPERTS, **zero(1)),
        clip=0.05,
    ),
    Bug(
        "radixark/miles_diffusion pull 35",
        "the norm in the log was that of one rank's part",
        "lm",
        on("dp=4", **zero(2)),
        clip=100.0,
    ),
    Bug(
        "NVIDIA/Megatron-LM pull 7227",
        "a tied embedding on two stages was counted twice: a norm up to sqrt(2) too large",
        "tied",
        on("pp=2 dp=2", **PIPE),
        clip=0.05,
    ),
    Bug(
        "ROCm/TransformerEngine pull 715",
        "weights that tensor ranks have copies of were marked as split, and counted once for each",
        "lm",
        on("tp=4", shard={"layers.*.up": "column", "layers.*.down": "row"}),
        clip=0.05,
    ),
    Bug(
        "pytorch/torchtitan issues 766",
        "the norm was another one on every rank",
        "two layers",
        on("dp=2 tp=2", **zero(3)),
        clip=0.05,
    ),
    Bug(
        "ByteDance-Seed/VeOmni issues 184",
        "with replicas of shards the norm counted every replica",
        "lm",
        on("dp_outer=2 dp=2", data={"axis": ["dp_outer", "dp"], "zero": 3, "bucket_mb": 0.002}),
        clip=0.05,
    ),
    Bug(
        "deepspeedai/DeepSpeed issues 7837",
        "the norm of ZeRO 0 was another one than that of ZeRO 1 to 3",
        "two layers",
        on("dp=2", **zero(0), **MICRO),
        clip=0.05,
    ),
]

UPDATES = [
    Bug(
        "pytorch/pytorch issues 101343",
        "flat parameters mix weights and biases: weight decay could not be left out for some",
        "lm",
        on("dp=2", **zero(3)),
        optimizer="named groups",
    ),
    Bug(
        "mlfoundations/open_clip pull 358",
        "flat parameters have one dim: `p.ndim < 2` put all of them into one group",
        "lm",
        on("dp=2", **zero(2)),
        optimizer="groups by dims",
    ),
    Bug(
        "facebookresearch/fairscale issues 697",
        "in a loop of one's own: groups of flat parameters by their dims",
        "lm",
        on("dp=2", **zero(2)),
        "refused: one group has all parameters, and another has none",
        check="own loop",
        optimizer="groups by dims",
    ),
    Bug(
        "facebookresearch/fairscale pull 721",
        "a frozen parameter in a flat one was trained",
        "layers",
        on("dp=2", **zero(3)),
        optimizer="decay",
    ),
    Bug(
        "facebookresearch/fairscale issues 605",
        "frozen layers in the middle: training went another way than on one device",
        "layers",
        on("dp=2", **zero(2), **MICRO),
        optimizer="adam",
    ),
    Bug(
        "huggingface/transformers pull 24088",
        "the learning-rate scheduler made a step for every rank in each step",
        "layers",
        on("dp=4"),
        check="scheduler",
    ),
    Bug(
        "NVIDIA/Megatron-LM issues 950",
        "parameters were read before the ranks that update them had sent them: those of the step before",
        "two layers",
        on("dp=2", **zero(3)),
        mutant="parameter read before it is published",
    ),
    Bug(
        "pytorch/pytorch pull 115710",
        "one rank's overflow did not reach the others: they stepped, and it did not",
        "layers",
        on("dp=2", precision={"compute": "float16", "loss_scale": "dynamic"}, **zero(1)),
        check="overflow",
    ),
    Bug(
        "NVIDIA-NeMo/Megatron-Bridge pull 5591",
        "after an overflow the stages scaled the loss by different numbers",
        "two layers",
        on("pp=2", precision={"compute": "float16", "loss_scale": "dynamic"}, **PIPE),
        check="overflow",
    ),
]

BUFFERS = [
    Bug(
        "pytorch/pytorch issues 62967",
        "synchronised batch norm on two GPUs was not that of one",
        "batch norm",
        on("dp=2"),
        mutant="count of one rank",
    ),
    Bug(
        "huggingface/pytorch-image-models issues 110",
        "every rank had running statistics of its own, and rank 0's were saved",
        "batch norm",
        on("dp=4"),
        mutant="new value of a buffer exchanged",
    ),
    Bug(
        "facebookresearch/detectron2 issues 5398",
        "statistics of ranks with different numbers of rows weighed the same",
        "batch norm",
        on("dp=3", uneven="pad"),
        mutant="padding left as it is",
    ),
    Bug(
        "giotto-ai/giotto-deep issues 75",
        "with accumulation, batch norm took the statistics of one microbatch",
        "batch norm",
        on("dp=2", **MICRO),
        "refused: takes all rows of the batch",
    ),
]

DATA = [
    Bug(
        "pytorch/pytorch issues 31771",
        "every epoch had the same order, where nobody called set_epoch",
        "layers",
        on("dp=2"),
        check="order of epochs",
    ),
    Bug(
        "pytorch/pytorch issues 25162",
        "the sampler repeated the first samples to fill the last batch: they counted twice in the mean",
        "layers",
        on("dp=4"),
        check="rest of an epoch",
    ),
    Bug(
        "huggingface/accelerate issues 2016",
        "a run that was resumed in its second epoch went on in the order of the first",
        "layers",
        on("dp=2"),
        check="resumed order",
    ),
    Bug(
        "KempnerInstitute/KempnerForge issues 57",
        "the second resume within an epoch read samples again",
        "layers",
        on("dp=2"),
        check="resumed twice",
    ),
    Bug(
        "verl-project/verl issues 7401",
        "a checkpoint at the end of an epoch made the resumed run skip the next one",
        "layers",
        on("dp=2"),
        check="resumed at the end",
    ),
]
