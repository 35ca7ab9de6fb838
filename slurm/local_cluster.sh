#!/bin/bash
# A Slurm cluster of two nodes on this machine, to try the templates on; as root, with slurm-wlm installed.
#   eval "$(slurm/local_cluster.sh start FOLDER)"     starts it, and sets SLURM_CONF for this shell
#   slurm/local_cluster.sh stop FOLDER                ends it; the folder can be deleted then
# Nodes have more CPUs and memory than the machine, because the templates ask for those of real nodes.
# A requeued job waits until credentials of its last attempt have expired: five seconds here, not Slurm's two minutes.

set -euo pipefail

free_ports() {
    python3 - "$1" <<'PYTHON'
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for probe in held:
    probe.bind(("127.0.0.1", 0))
print(*(probe.getsockname()[1] for probe in held))
PYTHON
}

start() {
    local folder host ports
    mkdir -p "$1"/{ctld,n1,n2,log}
    folder=$(cd "$1" && pwd)
    host=$(hostname -s)
    read -r -a ports <<<"$(free_ports 3)"
    cat >"$folder/slurm.conf" <<CONFIGURATION
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SchedulerParameters=sched_interval=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation=$folder/ctld
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/ctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/log/ctld
SlurmdLogFile=$folder/log/%n
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=16 RealMemory=80000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=16 RealMemory=80000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONFIGURATION
    export SLURM_CONF="$folder/slurm.conf"
    slurmctld >&2
    slurmd -N n1 >&2
    slurmd -N n2 >&2
    for _ in $(seq 120); do
        if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then
            echo "export SLURM_CONF='$SLURM_CONF'"
            return
        fi
        sleep 0.5
    done
    echo "error: the nodes did not start within a minute: see $folder/log." >&2
    return 1
}

case "${1:-} ${2:+folder}" in
"start folder")
    command -v slurmctld slurmd >/dev/null || {
        echo "error: Slurm is missing: apt-get install --no-install-recommends slurm-wlm" >&2
        exit 2
    }
    start "$2"
    ;;
"stop folder") SLURM_CONF="$2/slurm.conf" scontrol shutdown ;;
*)
    echo "error: ${1:-nothing}: call it with start or stop, and a folder." >&2
    exit 2
    ;;
esac
