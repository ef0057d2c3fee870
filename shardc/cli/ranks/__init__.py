"""Run the ranks of `shardc run`, `score` and `generate`: start their processes, and do their work.

make_job          makes a command's program and job, and starts the processes; job: what each process is started with
worker            the main function of each process; training_loop: steps, saves, signals; training_data: batches;
                  step_lines: printed lines and the log; step_metrics: FLOPs, MFU, bytes; best: which step is best
forward_jobs      the work of a process for score and generate
save_lock         only one run at a time saves to a folder
lasting_output    keeps a run alive when its output cannot be written any more
user_frames       prints a traceback with frames of the user's code only
"""
