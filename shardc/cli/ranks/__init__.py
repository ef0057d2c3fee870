"""What `shardc run`, `score` and `generate` do with ranks: start them, and what each process of a rank does.

start             makes a command's program and job, and starts the processes; job: what each of them is given
worker            what each process does; training_loop: steps, saves, signals; training_data: its batches;
                  step_lines: what it prints and logs; step_metrics: FLOPs, MFU, bytes
forward_jobs      the same for score and generate
compile_once      under torchrun, one process of a machine compiles for all
run_folder        the temporary folder of a run; save_lock: one run at a time saves to a folder
lasting_output    output that ends before the run does
user_frames       a traceback of the user's code alone
"""
