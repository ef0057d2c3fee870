"""What ops, collectives and copies take on a device: bytes and seconds. Passes, cost, plan and reports ask it.

work          what runs, as plain values: ops, collectives that begin and are waited for, storages
flops         counts an op's floating-point operations and memory traffic
device        what a device does in a second, and what an op takes of it; devices/: their descriptions
collectives   how long one collective takes
flights       collectives that are under way or queued, and share links
clock         the streams of one rank: it computes, one stream for each group of ranks, one for copies to the host
assumed       the device that passes assume
"""
