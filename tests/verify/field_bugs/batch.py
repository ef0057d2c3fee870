"""What is computed of all rows: losses, and buffers that forward updates."""

from __future__ import annotations

from tests.verify.field_bugs.bug import MICRO, Bug, on, zero

ALL_ROWS = [
    Bug(
        "tianzhi0549/FCOS issues 228",
        "each GPU divided its focal loss by its own number of positives, of which some have none",
        "focal",
        on("dp=2", **zero(3)),
    ),
    Bug(
        "fredzzhang/spatially-conditioned-graphs issues 39",
        "the number of positives was that of a rank's part of the batch",
        "focal",
        on("dp=4", **MICRO),
    ),
    Bug(
        "HiLab-git/SSL4MIS pull 101",
        "a dice loss is a ratio of sums: no mean of ranks",
        "dice",
        on("dp=3", uneven="pad"),
    ),
    Bug("lightly-ai/lightly pull 979", "embeddings were summed over GPUs, not gathered", "covariance", on("dp=4")),
    Bug(
        "facebookresearch/barlowtwins issues 33",
        "correlation matrices of parts of the batch were averaged",
        "cross-correlation",
        on("dp=2"),
    ),
    Bug("facebookresearch/dinov2 issues 360", "a rank's part of the assignments gave nan", "sinkhorn", on("dp=2")),
    Bug(
        "amazon-science/reskill pull 12",
        "advantages were whitened a second time, by what they came with in the batch",
        "whitened advantages",
        on("dp=2"),
    ),
    Bug(
        "akanazawa/fpo issues 13",
        "a deviation was computed part by part",
        "whitened advantages",
        on("dp=2", **MICRO),
        here="refused: a sum over values that depend on such a sum",
    ),
    Bug(
        "verl-project/verl issues 593",
        "means of answers became one mean of tokens",
        "groups of rows",
        on("dp=2", **MICRO),
    ),
    Bug(
        "huggingface/trl issues 2995", "loss and KL term were divided by different counts", "groups of rows", on("dp=4")
    ),
    Bug(
        "huggingface/trl pull 3231",
        "the mean of tokens depended on which samples were on which device",
        "all tokens",
        on("dp=2", **zero(2)),
    ),
    Bug(
        "NovaSky-AI/SkyRL pull 925",
        "microbatches and workers with fewer tokens weighed more",
        "all tokens",
        on("dp=2", **MICRO),
    ),
    Bug(
        "huggingface/trl pull 3938",
        "DAPO's count of tokens was one microbatch's",
        "all tokens",
        on("dp=3", uneven="pad"),
    ),
    Bug(
        "huggingface/trl pull 2615",
        "the DPO loss was not divided by the accumulation steps",
        "pairs in halves",
        on("dp=2", **MICRO),
    ),
    Bug(
        "huggingface/trl pull 5710",
        "reward models' accumulation was scaled for a loss that counts tokens",
        "pairs in turn",
        on("dp=2", **MICRO),
    ),
    Bug(
        "modelscope/ms-swift pull 10144",
        "microbatches with fewer preference pairs weighed them more",
        "valid pairs",
        on("dp=2", **MICRO),
    ),
    Bug(
        "pytorch/rl pull 3886", "pairs that were left out counted in the mean", "valid pairs", on("dp=3", uneven="pad")
    ),
]

STATE = [
    Bug(
        "espnet/espnet pull 6284",
        "codes were updated by a rank's rows, and rank 0's codes sent to the others",
        "codebook",
        on("dp=2"),
        optimizer="adam",
    ),
    Bug(
        "lucidrains/vector-quantize-pytorch pull 17",
        "every replica had a codebook of its own",
        "codebook",
        on("dp=3", uneven="pad"),
    ),
    Bug(
        "lucidrains/vector-quantize-pytorch issues 162",
        "a codebook that two quantizers share was updated between them",
        "codebook twice",
        on("dp=2"),
    ),
    Bug(
        "lucidrains/vector-quantize-pytorch issues 222",
        "learned codes were not the same on all workers",
        "learned codebook",
        on("dp=2", **zero(3)),
    ),
    Bug(
        "leggedrobotics/rsl_rl pull 226",
        "normalisers of ranks drifted apart; their variances cannot be summed",
        "running moments",
        on("dp=2"),
    ),
    Bug(
        "Denys88/rl_games pull 363",
        "merging whole totals counted shared history once for every rank",
        "running moments",
        on("dp=3", uneven="pad"),
    ),
    Bug(
        "lightly-ai/lightly pull 1629",
        "the center that was read was not the one updated",
        "center",
        on("dp=2", **MICRO),
    ),
    Bug(
        "pytorch/pytorch pull 13350",
        "D(real) - D(fake): the second forward changed the vectors of the first",
        "spectral norm, with hooks",
        on("dp=2", **zero(3)),
    ),
    Bug(
        "pytorch/pytorch issues 11476",
        "replicas lost the vector that each forward updates",
        "spectral norm",
        on("dp=2 tp=2"),
    ),
    Bug(
        "pytorch/pytorch issues 110363",
        "two forwards of a batch norm before one backward failed",
        "batch norm twice",
        on("dp=3", uneven="pad"),
    ),
    Bug(
        "pytorch/pytorch issues 40147",
        "synchronised batch norm without running statistics failed",
        "batch norm without buffers",
        on("dp=2"),
    ),
    Bug(
        "pytorch/pytorch issues 22095",
        "a module with a buffer could not be called twice",
        "buffer twice",
        on("dp=2", **MICRO),
    ),
    Bug(
        "pytorch/pytorch issues 96136",
        "recomputation updated running statistics a second time",
        "batch norm",
        on("dp=2", checkpoint=[{"match": "bn", "save": []}]),
    ),
    Bug(
        "pytorch/pytorch issues 62471",
        "a model's own checkpoint updates a batch norm twice, also on one device",
        "own checkpoint of a batch norm",
        on("dp=2"),
        here="refused: a batch counts twice in it",
    ),
]
