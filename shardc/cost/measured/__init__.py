"""Measure devices, and read what runs have measured.

device_file   finds and reads the description of a device: one of shardc's, or a measured one
measure       measures this machine: ops, collectives, least squares
op_times      the seconds of each op of a step that a run has timed
run_log       reads the log of a run, for a comparison with the prediction
"""
