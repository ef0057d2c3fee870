"""From one plan to another in memory: weights, buffers and the optimizer's state of an engine go to the ranks that have
them under another program of the same model, over the same ranks. No disk, and no rank ever has a whole tensor for it.

    places         where each rank has a tensor under a program: boxes of the global tensor. Pure arithmetic
    routes         who sends which box to whom. Pure arithmetic
    moves          the messages: rounds of bounded size, one all_to_all each
    wanted         which weights of two programs, and of their engines, are to move
    training       which tensors of the optimizer's state, and all that is no tensor
    between        from one engine to another

What a rank has already is copied; each other element that it needs comes once, from one of the ranks that have it.
"""
