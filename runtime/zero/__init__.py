"""Keep parameters in buckets: what ZeRO shards over the data axes, and how gradients are summed.

    bucket             one bucket: its flat buffer, the sum of its gradients, its shards, and ZeRO 3's gathers (the
                       graphs decide when each starts: shardc.passes.joint.write)
    buckets            all buckets of a rank: when each starts its sum, and when the sum is waited for
    flat_partition     where each parameter is in a bucket's flat buffer, and which part a rank owns
    optimizer_check    tests on a small copy whether an optimizer may be sharded; steps it bucket by bucket
    several_optimizers  combines several optimizers in one; prefers fused ones on GPUs
    named_parameters   the argument of the user's `optimizer(params)`, and what replaces its parameters by shards
    paged_optimizer    an optimizer whose state is outside of the device, and comes page by page
    trained_params     finds the parameters that get gradients

The optimizer works on a bucket's `.owned`: {name: parameter}: the parameter itself, or the shard of it in this rank's
part (1-d, perhaps empty). Reduced gradients are in `.owned[name].grad`. (Rajbhandari et al. 2020, "ZeRO")
"""
