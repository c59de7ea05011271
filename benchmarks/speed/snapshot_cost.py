"""Measures how much the servers' snapshots slow down an epoch of training.

    python benchmarks/speed/snapshot_cost.py [--mb 100] [--workers 2] [--rounds 7]

Real server and worker processes on one host, over shared memory; workers that compute nothing, so that the
server's time is all there is: the share in a real cell is smaller. Each round times the same run without
snapshots, with one an epoch, and without again, in alternating order; the ratio of the two runs
without is what noise alone makes of 1. Last, the CPU time of one snapshot by itself, which other load
disturbs least.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))

from stratbench.extensions.servers.policies.policies import make_policy
from stratbench.extensions.servers.policies.policy import Hyper
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.server import ServerConfig, run_server
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.ps.snapshots import SnapshotWriter

EPOCHS, STEPS = 4, 20
CONTENDERS = ("without", "snapshots", "without again")


def own_server(config: ServerConfig, secret: bytes) -> None:
    """The parameter server's process."""
    run_server(config, secret)


def own_worker(config: ServerConfig, secret: bytes, worker: int, numel: int) -> None:
    """A worker that computes nothing."""
    torch.set_num_threads(1)
    flat = FlatSpace(nn.ParameterList([torch.zeros(numel)]))
    channel = Channel.connect(config.rendezvous, worker, flat, secret, "shm")
    channel.rehearse_exchange()
    flat.grads.fill_(1.0)
    ticket = channel.wait_for_first_ticket()
    while ticket is not None:
        ticket = channel.push_pull()
    channel.close()


def train_time_s(contender: str, mb: float, workers: int) -> float:
    """The servers' time of one run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder, "stats.json")
        config = ServerConfig(
            rendezvous=f"{folder}/rendezvous",
            workers=workers,
            epochs=EPOCHS,
            steps_per_epoch=STEPS,
            slices_per_step=workers,
            policy="ps-async",
            hyper={"lr": 1e-3, "momentum": 0.9},
            snapshot_dir=f"{folder}/snapshots" if contender == "snapshots" else None,
            stats_path=str(stats),
        )
        secret, numel = os.urandom(32), int(mb * 1e6 / 4)
        running = [context.Process(target=own_server, args=(config, secret))]
        running += [
            context.Process(target=own_worker, args=(config, secret, w, numel))
            for w in range(workers)
        ]
        try:
            for process in running:
                process.start()
            for process in running:
                process.join(600)
        finally:
            for process in running:
                process.kill()
        if any(process.exitcode != 0 for process in running):
            raise RuntimeError(f"{contender}: {[process.exitcode for process in running]}")
        return json.loads(stats.read_text(encoding="utf-8"))["train_time_s"]


def cpu_of_a_snapshot_s(mb: float) -> float:
    """CPU time of copying and writing one snapshot, all threads together."""
    weights = torch.ones(int(mb * 1e6 / 4))
    shard = Shard(0, make_policy("ps-async", weights, Hyper(lr=0.1)), lambda worker, shard: None)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        writer = SnapshotWriter(folder, 0, 1, print)
        writer.request_snapshot(0, 0.0, [shard], None)
        writer.close()
        return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=100, help="size of the model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for number in range(arguments.rounds):
        for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            times[contender].append(train_time_s(contender, arguments.mb, arguments.workers))
    print(
        f"{arguments.mb:g} MB, {arguments.workers} workers, {EPOCHS} epochs of {STEPS} steps, "
        f"{arguments.rounds} rounds; time without snapshots: {median(times['without']):.2f} s"
    )
    for contender in CONTENDERS[1:]:
        ratios = [a / b for a, b in zip(times[contender], times["without"], strict=True)]
        print(
            f"{contender} / without: median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )
    torch.set_num_threads(1)
    alone_s = sorted(cpu_of_a_snapshot_s(arguments.mb) for _ in range(arguments.rounds))
    print(f"one snapshot: {median(alone_s):.3f} s of CPU, {alone_s[0]:.3f} to {alone_s[-1]:.3f}")


if __name__ == "__main__":
    main()
