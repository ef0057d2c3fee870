"""Compute bytes and seconds of ops, collectives and copies on a device, for passes, cost and plan.

work          the work of a rank as plain values: ops, collectives that start and are waited for, storages
flops         counts an op's floating-point operations and memory traffic
device        the rates of a device, and the seconds of an op on it; devices/: descriptions of devices
collectives   the seconds of one collective
clock         the streams of one rank: compute, one for each group of ranks (groups share links), one for host copies
assumed       the device that passes assume
"""
