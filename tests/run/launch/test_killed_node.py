"""The command of docs/operate/launchers.md for a killed node, with one rank on each of two torchrun agents."""

import re

from benchmarks.support.processes import ROOT, free_port
from tests.run.launch.launched import environment
from tests.run.launch.test_agent import wait_until
from tests.support.forked_python import ForkedPython

AGENT = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

dynamic_rendezvous.get_method_name = lambda depth=2: ""  # takes half a second with all the modules of a fork
main()
"""
RANK = """
import datetime, os, pathlib, signal, time
import torch, torch.distributed as dist

node, agent = os.environ["NODE"], os.getppid()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
done = torch.zeros(1)
while not done and os.getppid() == agent:
    if node == "killed" and pathlib.Path("kill").exists():
        os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    done.fill_(pathlib.Path("done").exists())
    dist.all_reduce(done)
    pathlib.Path(f"{node} in {dist.get_world_size()}").touch()
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_killed_node_leaves_and_joins_again(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    guide = (ROOT / "docs" / "operate" / "launchers.md").read_text()
    name, value, options = re.search(r"^(\S+)=(1) torchrun (.* --nnodes 1:2 .*?)\S+\.py", guide, re.M | re.S).groups()
    words = options.replace("\\\n", "").replace("HOST:29500", f"127.0.0.1:{free_port()}").split()
    words += ["--nproc-per-node", "1", "--local-addr", "127.0.0.1", "--rdzv-conf"]
    quick = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,is_host="
    agents = []

    def start(node):
        more = [f"{quick}{node == 'first'}", str(tmp_path / "rank.py")]
        env = environment(**{"NODE": node, name: value})
        agents.append(ForkedPython("-c", AGENT, *words, *more, cwd=tmp_path, env=env))

    def wait_for_world(*ranks):
        files = [tmp_path / f"{node} in {len(ranks)}" for node in ranks]
        assert wait_until(lambda: all(file.exists() for file in files)), f"no world of {ranks}"
        for file in tmp_path.glob("* in *"):
            file.unlink()

    try:
        start("first")
        start("killed")
        wait_for_world("first", "killed")
        (tmp_path / "kill").touch()
        wait_for_world("first")
        start("again")
        wait_for_world("first", "again")
        (tmp_path / "done").touch()
        ends = [(agent.communicate(timeout=20), agent.returncode) for agent in agents]
        assert [code for _, code in ends] == [0, -9, 0], ends
    finally:
        for agent in agents:
            agent.kill()
