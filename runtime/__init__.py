"""Run a program on a rank: its ops, its mesh, and the engine that trains. It imports no compiler.

ops/         the functions that programs call: conversions between placements, experts, random numbers
mesh/        collectives by mesh axis: over torch.distributed, or between threads of one process
schedule/    pipeline schedules as data: SCHEDULES, their text, the proof that they end
stage/       the graphs of a program's stages, run on one rank: interpreter, outputs, errors of ops
checks/      what an engine and a module check of the user's code, beside their step
step/        one rank's training step: engine, module, loss scaling
compiled/    pieces of step graphs as compiled code
zero/        buckets of parameters: what ZeRO shards, how gradients are summed
offload/     tensors that are kept outside of the device
state/       weights in, checkpoints in and out; storage/: the disks and stores that they are on
data/        a loader that reads this rank's part of each global batch
rng          random numbers that are the same on every mesh; distributions: torch's random ops with them
time_limits  how long ranks and processes wait for one another
launch       one process for every rank on this machine; whose error is shown if ranks fail
"""
