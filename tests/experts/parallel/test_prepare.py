import os
import subprocess
import sys

from tests.support.helpers import free_port

ENDS_AT_ONCE = """
import os
import sys
import torch
import torch.distributed as dist
from accelerate import Accelerator
from toolkit.integrations.accelerate.prepare import prepare

for rank in ("0", "1"):  # forks of a process that has imported, which end as programs do
    if not os.fork():
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        break
else:
    sys.exit(any([os.wait()[1], os.wait()[1]]))

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
many = [torch.ones(1) for _ in range(5_000)]
dist.all_reduce_coalesced(many)
sys.setswitchinterval(1000)  # so that gloo's thread, which frees the tensors of the next one, waits for the GIL
dist.all_reduce_coalesced(many)
print("ended with", accelerator.num_processes)
"""


def test_a_script_that_ends_with_its_last_collective_is_not_aborted():
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore", "-c", ENDS_AT_ONCE],
        env=os.environ | launched | {"ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout == "ended with 2\n" * 2
