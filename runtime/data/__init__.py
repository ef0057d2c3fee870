"""Read training data: each rank reads its part of each global batch, in one order on every mesh.

inputs         cuts a user's batch to this rank's part
loader         an iterable of batches for an engine; checkpoints save its position
ragged         microbatches that have lengths of their own
sampler        the order of samples: fixed by seed and epoch alone
samples        decides whether data are samples or global batches; torch's default collate, for plain Python too
worker         work of a DataLoader's workers: read the samples of this rank, with reproducible random numbers
same_samples   checks that all ranks have the same dataset, by comparing a few samples
sample_errors  makes errors of a dataset name the sample, and come unchanged from a worker process
"""
