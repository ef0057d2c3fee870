"""Move the training state of an engine to another plan in memory, over the same ranks.

Weights, buffers and the optimizer's state go to the ranks that have them under another program of the same model. No
disk is used, and no rank ever has a whole tensor for it.

    places         where each rank has a tensor under a program: boxes of the global tensor; which weights move
    routes         which rank sends which box to which. Pure arithmetic
    moves          the messages: rounds of bounded size, one all_to_all each
    runtime        from one engine, or module, to another: weights, or the optimizer's state and all else too
    report         the bytes that would move between the ranks of two plans

A rank copies what it has already; each other element comes once, from one of the ranks that have it.
"""
