"""Move weights, or all of training, from the ranks of one program to those of another, or into an inference engine.

Weights, buffers and the optimizer's state go to the ranks that have them under another program of the same model. No
disk is used, and no rank ever has a whole tensor for it. An engine is no program: a layout says where it keeps weights.

    places         where each rank has a tensor under a program: boxes of the global tensor; which weights move
    routes         which rank sends which box to which. Pure arithmetic
    moves          the messages: rounds of bounded size, one all_to_all each
    transports     how bytes go: over a mesh, or to processes of another world
    runtime        from one engine, or module, to another: weights, or the optimizer's state and all else too
    report         the bytes that would move between the ranks of two plans
    layout         where an engine keeps weights, as data; the proof that each element is written once
    conventions    layouts of vLLM and SGLang, and what an engine describes; tp_plan: of transformers' own plans
    engines        the moves into an engine: casts and scales, other processes, files

A rank copies what it has already; each other element comes once, from one of the ranks that have it.
"""
