"""A rank speaks for itself where the first one has gone, in its own words alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading


def test_a_store_that_goes_away_is_no_dump_of_frames() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(server.getsockname()[1]), "PYTHONPATH": os.pathsep.join(sys.path)}
        env.pop("TORCH_CPP_LOG_LEVEL", None)

        def gone() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=gone, daemon=True).start()
        script = (
            "from shardc.cli.same_error_once import for_this_rank as f;"
            " print(f('model.py:3: no'), f('no', alone=False))"
        )
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "model.py:3: no \n"
    assert done.stderr == ""
