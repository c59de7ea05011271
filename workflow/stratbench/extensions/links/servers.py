"""Times the push and pull of parameter servers, on this machine."""

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

from stratbench.extensions.links.collective_cost import Time
from stratbench.extensions.links.processes import TIMEOUT_S, forking, run_all
from stratbench.extensions.links.timing import Sweep
from stratbench.ps.client import Channel
from stratbench.ps.flat import FlatSpace
from stratbench.ps.server import serve
from stratbench.ps.server_config import ServerConfig

#: Pushes of a worker that are not timed, and that are: fewer where they are so many bytes in all.
WARM_PUSHES, MIN_PUSHES, MAX_PUSHES, PUSHED_BYTES = 2, 4, 10, 40 << 20
#: Weights of fewer bytes all take the same time.
SMALLEST_SERVED_BYTES = 1 << 16


@dataclass(frozen=True)
class Pushed:
    """One measurement of servers: `workers` push weights of `n_bytes` by `transport`, in a round."""

    transport: str
    workers: int
    n_bytes: int
    repeat: int

    @property
    def pushes(self) -> int:
        """Number of timed pushes of each worker."""
        return max(MIN_PUSHES, min(MAX_PUSHES, PUSHED_BYTES // self.n_bytes))

    def config(self, rendezvous: str) -> ServerConfig:
        return ServerConfig(
            rendezvous=rendezvous,
            workers=self.workers,
            epochs=1,
            steps_per_epoch=self.workers * (WARM_PUSHES + self.pushes),
            slices=1,
            policy="ps-async",
            hyper={"lr": 1e-3},
        )


def measure_servers(sweep: Sweep, transports: Sequence[str]) -> list[Time]:
    """Return the seconds between two pushes of a worker that computes nothing.

    They are by workers and bytes of the weights, with one server on this machine. All sizes, worker counts
    and transports (`tcp`, `shm`) are measured by the same processes, one after the other.
    """
    sizes = [s for s in sweep.sizes() if s >= SMALLEST_SERVED_BYTES] or [SMALLEST_SERVED_BYTES]
    counts = sorted({1, *sweep.workers})
    cells = [(t, n, size) for t in transports for n in counts for size in sizes]
    measurements = [
        Pushed(*cell, number)
        for number in range(sweep.repeats)
        for cell in random.Random(number).sample(cells, len(cells))
    ]
    with tempfile.TemporaryDirectory() as folder:
        secret, most = os.urandom(32), max(counts)
        together = forking().Barrier(most + 1)
        work: list[tuple[Any, tuple[Any, ...]]] = [
            (_pusher, (measurements, w, secret, folder, together)) for w in range(most)
        ]
        run_all([(_server, (measurements, secret, folder, together)), *work])
        ends = [
            json.loads(Path(folder, f"{w}.json").read_text(encoding="utf-8")) for w in range(most)
        ]
    return [
        Time(f"servers-{m.transport}", "push_pull", m.workers, 1, m.n_bytes, m.repeat,
             _push_s(m, [times[i] for times in ends[: m.workers]]))
        for i, m in enumerate(measurements)
    ]  # fmt: skip


def _push_s(m: Pushed, ends: Sequence[Sequence[float]]) -> float:
    """Return seconds of a push while all workers push.

    One may have pushed more often than another.
    """
    start = max(times[WARM_PUSHES - 1] for times in ends if len(times) > WARM_PUSHES)
    stop = min(times[-1] for times in ends if times)
    done = sum(start < t <= stop for times in ends for t in times)
    if not done:
        raise RuntimeError(
            f"{m.workers} workers, {m.n_bytes} bytes by {m.transport}: not all pushed at once"
        )
    return m.workers * (stop - start) / done


def _server(measurements: Sequence[Pushed], secret: bytes, folder: str, together: Barrier) -> None:
    rounds = measurements[-1].repeat + 1
    for i, m in enumerate(measurements):
        if i == 0 or m.repeat != measurements[i - 1].repeat:
            print(f"servers: round {m.repeat + 1} of {rounds}", flush=True)
        together.wait(TIMEOUT_S)
        serve(m.config(f"{folder}/{i}"), secret)


def _pusher(
    measurements: Sequence[Pushed], worker: int, secret: bytes, folder: str, together: Barrier
) -> None:
    torch.set_num_threads(1)
    ends: list[list[float]] = []
    for i, m in enumerate(measurements):
        ends.append([])
        # None begins the next before all have ended: what they measure would not be by itself.
        together.wait(TIMEOUT_S)
        if worker >= m.workers:
            continue
        flat = FlatSpace(nn.ParameterList([torch.zeros(m.n_bytes // 4)]))
        channel = Channel.connect(f"{folder}/{i}", worker, flat, secret, m.transport)
        ticket = channel.first()
        while ticket is not None:
            ticket = channel.push_pull()
            ends[-1].append(time.monotonic())
        channel.close()
    Path(folder, f"{worker}.json").write_text(json.dumps(ends), encoding="utf-8")
