"""Measures the time of push and pull at parameter servers on this machine."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratbench.extensions.links.collective_cost import CollectiveTime
from stratbench.extensions.links.processes import (
    TIMEOUT_S,
    make_forkserver_context,
    run_calls_in_processes,
)
from stratbench.extensions.links.timing import Sweep
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.ps.server_config import ServerConfig

#: Number of pushes per worker before the timed ones.
WARM_PUSHES = 2
#: Minimum and maximum number of timed pushes per worker.
MIN_PUSHES, MAX_PUSHES = 4, 10
#: Bytes that a worker pushes in all its timed pushes, if the limits on their number allow it.
PUSHED_BYTES = 40 << 20
#: Smallest weights to measure, since smaller ones take equal time.
SMALLEST_SERVED_BYTES = 1 << 16


@dataclass(frozen=True)
class PushMeasurement:
    """One measurement: `workers` workers push weights of `n_bytes` to a server and pull them."""

    transport: str
    workers: int
    n_bytes: int
    repeat: int

    @property
    def num_timed_pushes(self) -> int:
        """Number of timed pushes per worker, which is smaller for large weights."""
        return max(MIN_PUSHES, min(MAX_PUSHES, PUSHED_BYTES // self.n_bytes))

    def make_server_config(self, rendezvous: str) -> ServerConfig:
        return ServerConfig(
            rendezvous=rendezvous,
            workers=self.workers,
            epochs=1,
            steps_per_epoch=self.workers * (WARM_PUSHES + self.num_timed_pushes),
            slices_per_step=1,
            policy="ps-async",
            hyper={"lr": 1e-3},
        )


def measure_server_exchanges(sweep: Sweep, transports: Sequence[str]) -> list[CollectiveTime]:
    """Measure the seconds between two pushes of the same worker, for all sizes of weights.

    The workers do not compute. One server on this machine serves them. The same processes measure all sizes,
    worker counts and transports (`tcp`, `shm`), one after the other.
    """
    sizes = [s for s in sweep.list_tensor_sizes_bytes() if s >= SMALLEST_SERVED_BYTES] or [
        SMALLEST_SERVED_BYTES
    ]
    counts = sorted({1, *sweep.workers})
    cells = [(t, n, size) for t in transports for n in counts for size in sizes]
    measurements = [
        PushMeasurement(*cell, number)
        for number in range(sweep.repeats)
        for cell in random.Random(number).sample(cells, len(cells))
    ]
    with tempfile.TemporaryDirectory() as folder:
        secret, most = os.urandom(32), max(counts)
        together = make_forkserver_context().Barrier(most + 1)
        work: list[tuple[Any, tuple[Any, ...]]] = [
            (_run_pushing_worker, (measurements, w, secret, folder, together)) for w in range(most)
        ]
        run_calls_in_processes(
            [(_run_server_per_measurement, (measurements, secret, folder, together)), *work]
        )
        ends = [
            json.loads(Path(folder, f"{w}.json").read_text(encoding="utf-8")) for w in range(most)
        ]
    return [
        CollectiveTime(f"servers-{m.transport}", "push_pull", m.workers, 1, m.n_bytes, m.repeat,
             _compute_seconds_per_push(m, [times[i] for times in ends[: m.workers]]))
        for i, m in enumerate(measurements)
    ]  # fmt: skip


def _compute_seconds_per_push(
    measurement: PushMeasurement, push_ends_s: Sequence[Sequence[float]]
) -> float:
    """Return the seconds between two pushes of the same worker, while all workers push.

    Args:
        measurement: The measurement.
        push_ends_s: When each push of each worker ended; workers may have pushed different numbers of times.
    """
    start = max(times[WARM_PUSHES - 1] for times in push_ends_s if len(times) > WARM_PUSHES)
    stop = min(times[-1] for times in push_ends_s if times)
    done = sum(start < t <= stop for times in push_ends_s for t in times)
    if not done:
        raise RuntimeError(
            f"{measurement.workers} workers, {measurement.n_bytes} bytes over {measurement.transport}: the "
            "workers did not push at the same time; run `links` again on an idle machine"
        )
    return measurement.workers * (stop - start) / done


def _run_server_per_measurement(
    measurements: Sequence[PushMeasurement], secret: bytes, folder: str, barrier: Barrier
) -> None:
    rounds = measurements[-1].repeat + 1
    for i, m in enumerate(measurements):
        if i == 0 or m.repeat != measurements[i - 1].repeat:
            print(f"servers: round {m.repeat + 1} of {rounds}", flush=True)
        barrier.wait(TIMEOUT_S)
        run_server(m.make_server_config(f"{folder}/{i}"), secret)


def _run_pushing_worker(
    measurements: Sequence[PushMeasurement],
    worker_rank: int,
    secret: bytes,
    folder: str,
    barrier: Barrier,
) -> None:
    torch.set_num_threads(1)
    ends: list[list[float]] = []
    for i, m in enumerate(measurements):
        ends.append([])
        # All workers wait, so that no measurement overlaps with another.
        barrier.wait(TIMEOUT_S)
        if worker_rank >= m.workers:
            continue
        flat = FlatSpace(nn.ParameterList([torch.zeros(m.n_bytes // 4)]))
        channel = Channel.connect(f"{folder}/{i}", worker_rank, flat, secret, m.transport)
        ticket = channel.wait_for_first_ticket()
        while ticket is not None:
            ticket = channel.push_pull()
            ends[-1].append(time.monotonic())
        channel.close()
    Path(folder, f"{worker_rank}.json").write_text(json.dumps(ends), encoding="utf-8")
