"""The processes that time collectives: on this machine, on a SLURM job's nodes, or by a launcher.

python -m stratbench.extensions.links.group FOLDER as `srun` starts it on each node
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
from stratbench.extensions.links.collective_cost import Time
from stratbench.extensions.links.processes import TIMEOUT_S, run_all
from stratbench.extensions.links.timing import Sweep, measure
from stratbench.train.nodes.interface import set_gloo_interface
from stratbench.train.nodes.rendezvous import tcp_store
from stratbench.train.nodes.srun import run_on_nodes

#: All times, and kappa.
Measured = tuple[list[Time], float]


@dataclass(frozen=True)
class LinkGroup:
    """`a_node` processes on each of `nodes`, with a common `folder` for their rendezvous."""

    sweep: Sweep
    on_gpus: bool
    folder: str
    nodes: int
    a_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.a_node

    @property
    def result(self) -> Path:
        """The file to which rank 0 writes the measurements."""
        return Path(self.folder, "result.json")

    def measured(self) -> Measured:
        result = json.loads(self.result.read_text(encoding="utf-8"))
        return [Time(*t) for t in result["times"]], result["kappa"]

    def run(self, node: int) -> None:
        """The processes of one node, until all have ended. Raises RuntimeError where one fails."""
        run_all([(_member, (self, node, number)) for number in range(self.a_node)])


def measure_here(sweep: Sweep, on_gpus: bool) -> Measured:
    """`measure` by processes of this machine. Raises RuntimeError where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        group = LinkGroup(sweep, on_gpus, folder, 1, max(sweep.workers))
        group.run(0)
        return group.measured()


def measure_on_nodes(group: LinkGroup, cpus: int) -> Measured:
    """`measure` by processes of the SLURM job's nodes, with `cpus` cores on each.

    Raises RuntimeError where one fails.
    """
    folder = RunFolder(Path(group.folder))
    folder.create()
    try:
        plan = folder.path / "group.json"
        plan.write_text(json.dumps(asdict(group)), encoding="utf-8")
        ends_s = time.monotonic() + TIMEOUT_S

        def left_s() -> float:
            return ends_s - time.monotonic()

        if code := run_on_nodes(group.nodes, cpus, __spec__.name, [str(plan)], left_s):
            raise RuntimeError(
                f"the measurement on {group.nodes} nodes ended with code {code}; what its processes said "
                "stands above"
            )
        return group.measured()
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def _member(group: LinkGroup, node: int, number: int) -> None:
    rank = node * group.a_node + number
    if group.nodes > 1:
        store = tcp_store(RunFolder(Path(group.folder)), rank, group.world)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        store = dist.FileStore(f"{group.folder}/group", group.world)
    times, kappa = _in_group(
        group.sweep, group.on_gpus, number, store=store, rank=rank, world_size=group.world
    )
    if rank == 0:
        result = {"times": [astuple(t) for t in times], "kappa": kappa}
        group.result.write_text(json.dumps(result), encoding="utf-8")


def as_one_of_many(sweep: Sweep, on_gpus: bool) -> Measured | None:
    """`measure` as a process that a launcher started; None but for rank 0."""
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    measured = _in_group(sweep, on_gpus, local_rank, init_method="env://")
    return measured if rank == 0 else None


def _in_group(sweep: Sweep, on_gpus: bool, number: int, **group: Any) -> Measured:
    torch.set_num_threads(1)
    device = torch.device("cuda", number) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", timeout=timedelta(seconds=TIMEOUT_S), **group
    )
    try:
        if max(sweep.workers) > dist.get_world_size():
            raise RuntimeError(
                f"--workers {max(sweep.workers)}: only {dist.get_world_size()} were started"
            )
        measured = measure(sweep, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="group.json of `measure_on_nodes`")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    set_gloo_interface()
    plan = json.loads(args.plan.read_text(encoding="utf-8"))
    swept = {k: tuple(v) if isinstance(v, list) else v for k, v in plan["sweep"].items()}
    LinkGroup(**plan | {"sweep": Sweep(**swept)}).run(int(os.environ["SLURM_NODEID"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
