"""Runs the processes that time collectives: here, on a job's nodes, or under torchrun.

`srun` starts `python -m stratbench.extensions.links.group FOLDER` on each node.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.links.collective_cost import CollectiveTime
from stratbench.extensions.links.processes import TIMEOUT_S, run_calls_in_processes
from stratbench.extensions.links.timing import MeasuredLinks, Sweep, measure_collectives
from stratbench.train.nodes.interface import set_gloo_interface
from stratbench.train.nodes.rendezvous import connect_tcp_store
from stratbench.train.nodes.srun import run_module_on_nodes


@dataclass(frozen=True)
class LinkGroup:
    """Processes that time collectives together, `workers_per_node` on each of `nodes` nodes.

    The processes find each other through a common `folder`.
    """

    sweep: Sweep
    on_gpus: bool
    folder: str
    nodes: int
    workers_per_node: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def measurements_path(self) -> Path:
        """JSON file to which rank 0 writes the measurements."""
        return Path(self.folder, "result.json")

    def read_measurements(self) -> MeasuredLinks:
        result = json.loads(self.measurements_path.read_text(encoding="utf-8"))
        return [CollectiveTime(*t) for t in result["times"]], result["kappa"]

    def run_processes_of_node(self, node_rank: int) -> None:
        """Run this group's processes on one node, and wait until all have ended.

        Raises:
            RuntimeError: If a process fails.
        """
        run_calls_in_processes(
            [
                (_run_measuring_process, (self, node_rank, local))
                for local in range(self.workers_per_node)
            ]
        )


def measure_links_on_this_node(sweep: Sweep, on_gpus: bool) -> MeasuredLinks:
    """Run the measuring processes on this machine, and return the measurements.

    Raises:
        RuntimeError: If a process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        group = LinkGroup(sweep, on_gpus, folder, 1, max(sweep.workers))
        group.run_processes_of_node(0)
        return group.read_measurements()


def measure_links_on_nodes(group: LinkGroup, cpus: int) -> MeasuredLinks:
    """Run the measuring processes on all nodes of this SLURM job, and return the measurements.

    Args:
        group: The processes to run.
        cpus: CPU cores per node.

    Raises:
        RuntimeError: If a process fails.
    """
    folder = RunFolder(Path(group.folder))
    folder.create_empty_folder()
    try:
        plan = folder.path / "group.json"
        plan.write_text(json.dumps(asdict(group)), encoding="utf-8")
        ends_s = time.monotonic() + TIMEOUT_S

        def compute_s_until_timeout() -> float:
            return ends_s - time.monotonic()

        if code := run_module_on_nodes(
            group.nodes, cpus, __spec__.name, [str(plan)], compute_s_until_timeout
        ):
            raise RuntimeError(
                f"the measurement on {group.nodes} nodes ended with exit code {code}; the output of its "
                "processes above says why"
            )
        return group.read_measurements()
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def _run_measuring_process(group: LinkGroup, node_rank: int, local_rank: int) -> None:
    rank = node_rank * group.workers_per_node + local_rank
    if group.nodes > 1:
        store = connect_tcp_store(RunFolder(Path(group.folder)), rank, group.world_size)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        store = dist.FileStore(f"{group.folder}/group", group.world_size)
    times, compute_slowdown = _measure_in_process_group(
        group.sweep, group.on_gpus, local_rank, store=store, rank=rank, world_size=group.world_size
    )
    if rank == 0:
        result = {"times": [astuple(t) for t in times], "kappa": compute_slowdown}
        group.measurements_path.write_text(json.dumps(result), encoding="utf-8")


def measure_links_in_launched_process(sweep: Sweep, on_gpus: bool) -> MeasuredLinks | None:
    """Measure links in a process that a launcher such as torchrun started.

    The result is None unless the process has rank 0.
    """
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    measured = _measure_in_process_group(sweep, on_gpus, local_rank, init_method="env://")
    return measured if rank == 0 else None


def _measure_in_process_group(
    sweep: Sweep, on_gpus: bool, local_rank: int, **group_arguments: Any
) -> MeasuredLinks:
    torch.set_num_threads(1)
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", timeout=timedelta(seconds=TIMEOUT_S), **group_arguments
    )
    try:
        if max(sweep.workers) > dist.get_world_size():
            raise RuntimeError(
                f"--workers {max(sweep.workers)}: only {dist.get_world_size()} processes were started; "
                "start one process per worker, or give a smaller number"
            )
        measured = measure_collectives(sweep, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "plan",
        type=Path,
        help="JSON file with the processes that measure together: their sweep and nodes",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    set_gloo_interface()
    plan = json.loads(args.plan.read_text(encoding="utf-8"))
    swept = {k: tuple(v) if isinstance(v, list) else v for k, v in plan["sweep"].items()}
    LinkGroup(**plan | {"sweep": Sweep(**swept)}).run_processes_of_node(
        int(os.environ["SLURM_NODEID"])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
