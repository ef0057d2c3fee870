"""Rows of every length: deal them to ranks and microbatches by predicted seconds (`batch: {balance: true}`).

section      the key of the spec
arrangement  which row goes where: pure functions of lengths and seconds
seconds      seconds of a microbatch by its length, fitted to the cost of compiled programs
same_step    whether programs of several lengths may share one step
runtime      what a loader asks: the order of a batch's samples, the length of each microbatch
lengths      a distribution of lengths: a file, or a dataset
report       what balancing gains, before a device is used (`--lengths` of `shardc cost` and `plan`)
"""
