"""The configuration files of the test cluster, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

#: An option of sbatch: SLURM reads the memory of the job's processes every second, and kills it for too much.
MEMORY_EACH_SECOND = "--acctg-freq=task=1"


def slurm_conf(
    directory: Path,
    name: str,
    host: str,
    user: str,
    ports: Mapping[str, int],
    nodes: Sequence[str],
    cpus: int,
    gpus: int,
    memory_mib: int,
    control_groups: bool = False,
) -> str:
    """slurm.conf of a cluster in `directory` whose daemons run as `user` on `host`.

    `ports` has one for `slurmctld`, one for each node and, where there is accounting, one for
    `slurmdbd`. `cpus`, `gpus` and `memory_mib` are those of one node. With `control_groups` the kernel keeps
    a job's limit of memory, as on most clusters, else SLURM does.
    """
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    node_lines = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node]} "
        f"CPUs={cpus} RealMemory={memory_mib}{gres}"
        for node in nodes
    )
    # SlurmdTimeout and KillWait are short so that a test of a lost node or of a time limit need
    # not wait minutes; MinJobAge is long so that a test can ask for its ended jobs. Jobs are scheduled as
    # they come (at most every 0.1 s), not every 2 or 3 s. SLURM reads the memory of a job's processes every
    # half a minute; a job that is to be killed for it asks for `MEMORY_EACH_SECOND`.
    return f"""ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports["slurmctld"]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/run/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin={"task/cgroup" if control_groups else "task/none"}
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={memory_mib // cpus}
SlurmdTimeout=20
KillWait=5
MinJobAge=3600
{_accounting(directory, ports)}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams={"UsePss" if control_groups else "OverMemoryKill,UsePss"}
GresTypes=gpu
{node_lines}
PartitionName=gpu Nodes={",".join(nodes)} Default=YES MaxTime=INFINITE State=UP
"""


def _accounting(directory: Path, ports: Mapping[str, int]) -> str:
    if "slurmdbd" not in ports:
        return "AccountingStorageType=accounting_storage/none"
    return f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports["slurmdbd"]}
AccountingStoragePass={directory}/run/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
AccountingStorageEnforce=associations"""


#: cgroup.conf with limits of memory, in the kernel's control groups of version 1.
CGROUP_CONF = """CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
"""


def gres_conf(directory: Path, nodes: Sequence[str], gpus: int) -> str:
    """gres.conf: `gpus` pretend GPUs a node, for which SLURM sets CUDA_VISIBLE_DEVICES."""
    text = "AutoDetect=off\n"
    if gpus:
        text += (
            f"NodeName={','.join(nodes)} Name=gpu File={directory}/dev/nvidia[0-{gpus - 1}] "
            "Flags=nvidia_gpu_env\n"
        )
    return text


def slurmdbd_conf(directory: Path, host: str, user: str, port: int) -> str:
    """slurmdbd.conf: accounting kept in a database that listens on a socket in `directory`."""
    return f"""AuthType=auth/munge
AuthInfo=socket={directory}/run/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={directory}/run/slurmdbd.pid
LogFile={directory}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm_acct_db
"""
