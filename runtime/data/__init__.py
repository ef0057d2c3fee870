"""Training data: every rank reads its own part of each global batch, in an order that is the same on every mesh.

inputs         a user's batch -> this rank's part of it
loader         an iterable of batches for an engine, which checkpoints know the position of
sampler        the order of samples: fixed by seed and epoch alone
worker         what a DataLoader's workers do: read the samples of this rank, with random numbers of their own
same_samples   all ranks have the same dataset: a few samples of it are compared
sample_errors  what a dataset raises names the sample, and leaves a worker process as it is
"""
