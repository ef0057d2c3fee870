"""How long `shardc plan` takes for large models' shapes, and what it finds: Llama 3 405B on 16,384 H100s and 8B on 64,
DeepSeek-V3 and Kimi K2 on 2,048. Nothing is asserted.

    python tests/bench/plan_large.py deepseek-v3
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench import shapes

#: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
#: (config, options)
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama-405b": (
        shapes.llama("405B", model_type="llama", max_position_embeddings=131072),
        "--batch 1 --seq 8192 --devices 16384 --device h100-80g --global-batch 2048",
    ),
    "llama-8b": (
        shapes.llama("8B", model_type="llama", max_position_embeddings=131072),
        "--batch 1 --seq 8192 --devices 64 --device h100-80g --global-batch 256",
    ),
    "deepseek-v3": (DEEPSEEK, "--batch 1 --seq 4096 --devices 2048 --device h100-80g --global-batch 16384"),
    # https://huggingface.co/moonshotai/Kimi-K2-Base/blob/main/config.json
    "kimi-k2": (
        DEEPSEEK
        | {
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
            "vocab_size": 163840,
        },
        "--batch 1 --seq 4096 --devices 2048 --device h100-80g --global-batch 16384",
    ),
}


def main() -> None:
    config, options = MODELS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        started = time.perf_counter()
        from shardc.cli import app

        app(["plan", f"hf:{path}", *options.split(), *sys.argv[2:]], standalone_mode=False)
        clock, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        cpu, most = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
        print(f"{clock:.1f} s, {cpu:.1f} s of CPU; {most:.2f} GiB at most", file=sys.stderr)


if __name__ == "__main__":
    main()
