"""What is measured of a device and of a run.

device_file   the file that says what a device does: of shardc's own, or measured
measure       measures the device at hand: ops, collectives, least squares
op_times      the seconds of each op of a step that a run has timed
run_log       what a run has written, laid over what was predicted
"""
