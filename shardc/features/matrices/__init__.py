"""Run optimizers over whole matrices: each matrix has an owner, a rank that steps it.

Gradients go there, updates come back, the optimizer's state stays (`optimizer: {matrices: ...}`). Such optimizers are
Muon, Shampoo, SOAP, Adafactor, LAMB.

    section        the section of a spec
    program        the matrices of a parameter
    passes         how each parameter is cut into matrices
    proof          each matrix has one owner, and its elements arrive and return
    owners         which rank steps which matrix
    routes         which rank sends which part of which matrix to which: pure arithmetic
    exchange       the messages: buckets of matrices, one all_to_all each
    stand_ins      the argument of the user's function: a placeholder for each matrix
    whole          the matrices that this rank owns, in the optimizers that need them whole
    own_loop       their step in a custom loop
    runtime        what core asks: the above, and the assumed optimizer of a program without one, for costs
"""
