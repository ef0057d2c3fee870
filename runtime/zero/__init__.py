"""Buckets of parameters: what ZeRO shards over the data axes, and how gradients are summed (Rajbhandari et al. 2020,
"ZeRO").

    bucket             one bucket: its flat buffer, the sum of its gradients, what ZeRO shards of it
    buckets            all buckets of a rank: when each begins its sum, and is waited for
    flat_partition     where each parameter is in a bucket's flat buffer, and which part a rank owns
    gather             ZeRO 3's gathers: ahead of use, freed after it, again in backward (where forward's stand in
                       the program: shardc.passes.gradient_buckets)
    rounded_gather     the same, of parameters that are rounded to float8 before
    optimizer          a user's optimizer on this rank's stretches of parameters
    optimizer_check    may this optimizer be sharded, or stepped bucket by bucket? It is tried on a small copy
    early_step         the optimizer steps bucket by bucket, while later gradients are still being summed
    optimizer_kernels  which of torch's implementations steps: fused ones on GPUs
    optimizer_list     several optimizers as one; named_parameters: what a user's `optimizer(params)` is given
    offloaded_optimizer  an optimizer whose state is outside of the device
    trained_params     the parameters whose gradients a program computes at all

What the optimizer works on is a bucket's `.owned`: {name: parameter}: the parameter itself, or the stretch of it in
this rank's part (1-d, perhaps empty). Reduced gradients are in `.owned[name].grad`.
"""
