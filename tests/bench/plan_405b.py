"""How long `shardc plan` takes for Llama 3 405B's shape on 16,384 H100s, and what it finds. Nothing is asserted: python
tests/bench/plan_405b.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def main() -> None:
    started = time.perf_counter(), time.process_time()
    from shardc.cli import app

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        options = "--batch 1 --seq 8192 --devices 16384 --device h100-80g --global-batch 2048"
        app(["plan", f"hf:{config}", *options.split()], standalone_mode=False)
    print(
        f"{time.perf_counter() - started[0]:.0f} s, of which {time.process_time() - started[1]:.0f} s on the CPU;"
        " import included",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
