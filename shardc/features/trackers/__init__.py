"""Record runs in trackers (`run: {track: [wandb, mlflow]}`, `--track wandb`): each is a callback of the first rank.

runtime          what core asks: which trackers there are; a tracker as a callback, whose failures never end a run
wandb, mlflow, tensorboard, opentelemetry    the trackers, each a few lines over its client
"""
