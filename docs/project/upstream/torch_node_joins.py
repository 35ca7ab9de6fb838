"""A node that joins a running torchrun job never learns the address of the store, and the job fails.

python torch_node_joins.py
"""

import os
import subprocess
import sys

import torch.distributed as dist

RANK = """
import datetime, os, time
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
print(f"{os.environ['NODE']} node: world of {dist.get_world_size()}", flush=True)
while dist.get_world_size() == 1:
    time.sleep(0.1)
"""

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
options += ["--rdzv-conf", "is_host=0,last_call_timeout=1,read_timeout=20", "--local-addr", "127.0.0.1", "--no-python"]
command = [sys.executable, "-m", "torch.distributed.run", *options, sys.executable, "-c", RANK]
first = subprocess.Popen(command, env=os.environ | {"NODE": "first"}, stdout=subprocess.PIPE, text=True)
print(first.stdout.readline(), end="")
second = subprocess.Popen(command, env=os.environ | {"NODE": "second"})
print(first.communicate()[0], end="")
codes = [first.returncode, second.wait()]
print(f"exit codes of the agents: {codes}")
sys.exit(codes != [0, 0])
