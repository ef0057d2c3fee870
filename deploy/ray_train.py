"""Train with shardc in the workers of Ray Train.

Tried: on one machine with Ray 2.60, with 4 CPU workers, and then from their checkpoint with 2.

    python deploy/ray_train.py model.py spec.yaml --workers 4 --steps 100 --save /shared/runs/a

Ray starts the processes and connects them; shardc joins that world. The number of ranks is that of the spec's mesh.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def module_of(path: str) -> Any:
    """Import the model file, as `shardc run` does."""
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location("model_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(config: dict[str, Any]) -> None:
    """Train in one worker: the same work as a rank of `shardc run`."""
    import torch

    import shardc
    from shardc.errors import ShardcError

    file = module_of(config["model"])
    torch.manual_seed(0)  # the same weights in every worker
    model, example = file.model(), file.batch()
    program = shardc.compile(model, example, config["spec"], loss=getattr(file, "loss", None))
    engine = program.engine(model, optimizer=getattr(file, "optimizer", lambda ps: torch.optim.AdamW(ps, lr=3e-4)))
    rows = engine.loader(file.data("train")) if hasattr(file, "data") else None
    try:
        engine.load(config["save"])  # also after Ray has restarted the workers
    except ShardcError as e:
        if "there is no checkpoint" not in str(e):
            raise
    while engine.step_count < config["steps"]:
        for part in rows if rows is not None else [example]:
            loss = engine.step(part, local=rows is not None)
            if engine.step_count % config["every"] == 0:
                engine.save(config["save"], wait=False)
            ray.train.report({"step": engine.step_count, "loss": float(loss)})
            if engine.step_count >= config["steps"]:
                break
    engine.save(config["save"])
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("spec")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPU cores that Ray reserves for each worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--save", required=True, help="folder that all workers see, or s3://...")
    args = parser.parse_args()
    config = {**vars(args), "model": str(Path(args.model).resolve()), "spec": str(Path(args.spec).resolve())}
    reserved = {"CPU": args.cpus, **({"GPU": 1} if args.gpu else {})}
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=args.gpu, resources_per_worker=reserved)
    run = RunConfig(failure_config=FailureConfig(max_failures=3))
    TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    main()
