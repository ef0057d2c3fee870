"""Gradients of gradients, parameters without one, and ops along dims that are split."""

from __future__ import annotations

from tests.verify.field_bugs.bug import MICRO, PIPE, Bug, Spec, on, zero

DERIVATIVES = [
    Bug(
        "pytorch/pytorch issues 47562",
        "a gradient penalty gives the last bias no gradient: the others were not summed over ranks",
        "gradient penalty",
        on("dp=2", **zero(3)),
        optimizer="adam",
    ),
    Bug(
        "pytorch/pytorch issues 19024",
        "losses of a WGAN exploded on several GPUs",
        "gradient penalty",
        on("dp=2 tp=2"),
    ),
    Bug(
        "pytorch/pytorch issues 63929",
        "what a gradient is made of was not synchronised",
        "a step inside",
        on("dp=3", uneven="pad"),
    ),
    Bug(
        "Lightning-AI/pytorch-lightning issues 20866",
        "a GAN's two losses need parameters that are unused in turn",
        "two losses",
        on("dp=2", **zero(2), **MICRO),
        optimizer="adam",
    ),
    Bug(
        "pytorch/pytorch issues 28294",
        "parameters without a gradient got zeros: their weights decayed",
        "unused",
        on("dp=2", **zero(2)),
        optimizer="adam",
    ),
    Bug(
        "pytorch/pytorch issues 128949",
        "with unused parameters ranks drifted apart, without an error",
        "unused",
        on("dp=2"),
        optimizer="adam",
    ),
    Bug(
        "pytorch/pytorch issues 94857",
        "a head that was used first without a gradient got none",
        "shared head",
        on("dp=2", **zero(2)),
    ),
    Bug(
        "pytorch/pytorch issues 109191",
        "with a model's own checkpoints ranks kept gradients of their own",
        "own checkpoints",
        on("dp=2 tp=2"),
    ),
    Bug(
        "pytorch/pytorch issues 152827",
        "a stage's input that it only hands on had no gradient to send back",
        "skip",
        on("pp=2", **PIPE),
    ),
    Bug(
        "deepspeedai/DeepSpeed issues 3895",
        "stages could not send positions and masks, which have no gradient",
        "skip",
        on("pp=2 dp=2", **PIPE),
    ),
    Bug(
        "deepspeedai/DeepSpeed issues 8224",
        "ZeRO 2 lost one of the two gradients of an encoder that runs twice a step",
        "an encoder run twice",
        on("dp=2", **zero(2), **MICRO),
        clip=0.5,
    ),
]

#: Where `use: structure` would leave the weights whole, as an op needs their result whole.
BY_NAME: Spec = {"shard": {"up": "column", "down": "row"}}
OPS = [
    Bug(
        "pytorch/pytorch issues 163193",
        "a number was added to a sum by every rank that has a summand of it",
        "numbers and sums",
        on("dp=2 tp=2", **BY_NAME),
    ),
    Bug(
        "pytorch/pytorch issues 179502",
        "a view of a split dim, as dims of other sizes, was a view of each rank's part",
        "other dims",
        on("dp=2"),
    ),
    Bug(
        "pytorch/pytorch pull 178785",
        "softmax, norms and slices took a fused weight's parts for one stretch",
        "parts of features",
        on("tp=2", shard={"up.*": {0: {"axis": "tp", "split": 2}}}),
    ),
    Bug(
        "pytorch/pytorch issues 168940",
        "the place of the largest was a rank's own",
        "largest of features",
        on("tp=2", **BY_NAME),
    ),
    Bug(
        "pytorch/pytorch pull 173936",
        "places of the largest were reduced over ranks by their maximum",
        "straight through",
        on("tp=4", **BY_NAME),
    ),
    Bug(
        "intel/torch-xpu-ops issues 3505",
        "filling entries of a split dim gave wrong numbers",
        "filled features",
        on("tp=2", **BY_NAME),
    ),
    Bug(
        "pytorch/pytorch issues 170934",
        "writing to places of a split dim took them for a rank's own",
        "added at places",
        on("dp=2 tp=2", **BY_NAME),
    ),
    Bug(
        "pytorch/pytorch issues 131992",
        "a norm in the loss was that of a rank's part",
        "norm of weights",
        on("dp=2 tp=2", **zero(3)),
    ),
    Bug(
        "pytorch/pytorch issues 144054",
        "item() of a split tensor gave a rank's part",
        "number of a norm",
        on("tp=2"),
        here="refused: becomes a Python number",
    ),
    Bug("NVIDIA/physicsnemo pull 1421", "group norm of an uneven split was wrong", "group norm", on("tp=2")),
    Bug(
        "pytorch/pytorch issues 189720",
        "gradients divided by how often a row is looked up: in the whole batch",
        "counted rows of a table",
        on("dp=4", **MICRO),
    ),
    Bug(
        "pytorch/pytorch issues 87497",
        "a rank whose batch is all padding broke the sum of sparse gradients",
        "padding only",
        on("dp=2", **zero(3)),
    ),
    Bug(
        "lucidrains/x-transformers issues 294",
        "rows that are drawn by lot, of all rows",
        "rows by lot",
        on("dp=2"),
        check="verify",
    ),
]
