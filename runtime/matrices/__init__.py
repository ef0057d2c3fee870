"""Optimizers over whole matrices (Muon, Shampoo, SOAP, Adafactor, LAMB): each matrix has an owner, a rank that steps
it. Gradients go there, updates come back, the optimizer's state stays (`optimizer: {matrices: ...}`).

    owners         which rank steps which matrix
    routes         who sends which part of which matrix to whom: pure arithmetic
    exchange       the messages: buckets of matrices, one all_to_all each
    shown          what the user's function is given: a stand-in for each matrix
    whole          the matrices that this rank owns, in the optimizers that need them whole
    own_loop       their step in a loop of the user's own
    assumed        what is counted of a program whose optimizer nobody has named

Which matrices a parameter consists of: shardc.ir.matrices.
"""
