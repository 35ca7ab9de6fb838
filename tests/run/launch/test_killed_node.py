"""The command of docs/operate/launchers.md for a killed node, with one rank on each of two torchrun agents."""

import re
import time

from benchmarks.support.processes import ROOT, free_port
from tests.run.launch.launched import environment
from tests.support.forked_python import ForkedPython

AGENT = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

dynamic_rendezvous.get_method_name = lambda depth=2: ""  # takes half a second with all the modules of a fork
main()
"""
RANK = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist

node, agent = os.environ["NODE"], os.getppid()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
done = torch.zeros(1)
while not done:
    if os.getppid() != agent:
        sys.exit("the agent is gone")
    if node == "killed" and pathlib.Path("kill").exists():
        os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    done.fill_(pathlib.Path("done").exists())
    dist.all_reduce(done)
    pathlib.Path(node).write_text(str(dist.get_world_size()))
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_killed_node_leaves_and_joins_again(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rank.py").write_text(RANK)
    guide = (ROOT / "docs" / "operate" / "launchers.md").read_text()
    variable, options = re.search(r"^(\S+=1) torchrun (.* --nnodes 1:2 .*?)\S+\.py", guide, re.M | re.S).groups()
    words = options.replace("\\\n", "").replace("HOST:29500", f"127.0.0.1:{free_port()}").split()
    quick = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,is_host="
    name, value = variable.split("=")

    def start(node):
        conf = f"{quick}{node == 'first'}"
        more = ["--nproc-per-node", "1", "--local-addr", "127.0.0.1", "--rdzv-conf", conf, str(tmp_path / "rank.py")]
        env = environment(**{"NODE": node, name: value})
        return ForkedPython(str(tmp_path / "agent.py"), *words, *more, cwd=tmp_path, env=env)

    def wait_for_world(size, *nodes):
        deadline = time.monotonic() + 60
        while any(not (tmp_path / node).exists() or (tmp_path / node).read_text() != size for node in nodes):
            assert time.monotonic() < deadline, f"no world of {size} ranks"
            time.sleep(0.05)

    agents = [start("first"), start("killed")]
    try:
        wait_for_world("2", "first", "killed")
        (tmp_path / "kill").touch()
        wait_for_world("1", "first")
        agents.append(start("again"))
        wait_for_world("2", "first", "again")
        (tmp_path / "done").touch()
        codes = []
        for agent in agents:
            _, err = agent.communicate(timeout=20)
            codes.append((agent.returncode, err))
        assert [code for code, _ in codes] == [0, -9, 0], codes
    finally:
        for agent in agents:
            agent.kill()
