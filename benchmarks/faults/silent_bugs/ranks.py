"""Runs of a script on two processes, for a tracer that takes long to begin: it begins once, and ranks are forks of it.

A script that calls `fork` goes on once for each rank of each run; the process that called it waits and ends.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

RANKS = 2


def fork(runs: Mapping[str, Sequence[str]]) -> None:
    """Go on as each rank of each of `runs`, one run after another: the arguments of the script, by the folder that
    TrainCheck writes the trace to."""
    for folder, arguments in runs.items():
        children = []
        with socket.socket() as reserved:  # nobody else is given its port
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            for rank in range(RANKS):
                child = os.fork()
                if child == 0:
                    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
                    os.environ.update(MASTER_PORT=str(reserved.getsockname()[1]))
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), TRAINCHECK_OUTPUT_DIR=folder)
                    sys.argv[1:] = arguments
                    return
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            print(f"run {os.path.basename(folder)}: ranks ended with {codes}", flush=True)
            os._exit(1)
    os._exit(0)
