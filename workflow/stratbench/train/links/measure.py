"""Measures what links cost: collectives, servers' push and pull, and how much computing slows beside them.

    python -m stratbench.train.links.measure --workers 2 4 --largest-mib 100 --out results/links
    torchrun --nnodes 2 --nproc-per-node 8 -m stratbench.train.links.measure --workers 16 --out results/links

The first starts the processes of this machine itself (NCCL with --gpus, else gloo); under torchrun, or any
launcher that sets RANK, WORLD_SIZE and MASTER_ADDR, this process is one of them. The measurements of a round
come in an order of their own, so that a machine that changes meanwhile changes all alike. Writes `times.csv`
(every measurement) and `links.csv` (a row for each kind and level: latency of a step, rate, knee, spread).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stratbench.cell.files import write_atomic
from stratbench.ps.client import Channel
from stratbench.ps.flat import FlatSpace
from stratbench.ps.server import serve
from stratbench.ps.server_config import ServerConfig
from stratbench.telemetry.collective_cost import FittedLink, Time, fitted_links
from stratbench.train.links.timing import KINDS, Sweep, measure

#: Pushes of a worker that are not timed, and that are: fewer where they are so many bytes in all.
WARM_PUSHES, FEWEST_PUSHES, MOST_PUSHES, PUSHED_BYTES = 2, 4, 10, 40 << 20
#: Weights of fewer bytes all take the same time.
SMALLEST_SERVED_BYTES = 1 << 16
TIMEOUT_S = 1800.0
TRANSPORTS = ("shm", "tcp")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    sweep = Sweep(
        tuple(sorted(set(args.workers))), args.largest_mib << 20, args.repeats, tuple(args.kinds)
    )
    if "RANK" in os.environ:
        found = _as_one_of_many(sweep, args.gpus)
        if found is None:
            return 0
        times, kappa = found
    else:
        times, kappa = measure_here(sweep, args.gpus) if args.kinds else ([], math.nan)
        if args.servers:
            times += measure_servers(sweep, args.servers)
    write_links(args.out, times, kappa)
    print(f"Written: {args.out / 'links.csv'}, {args.out / 'times.csv'}")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.train.links.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="counts (2)")
    parser.add_argument("--largest-mib", type=int, default=64, help="the largest tensor (64)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (7)")
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=KINDS, help="of collectives (all)"
    )
    parser.add_argument("--gpus", action="store_true", help="on GPUs with NCCL; else CPUs and gloo")
    parser.add_argument(
        "--servers",
        nargs="*",
        choices=TRANSPORTS,
        default=[],
        help="parameter servers, too, by these",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the two files")
    args = parser.parse_args(argv)
    if min(args.workers) < 2:
        parser.error(f"--workers {min(args.workers)}: a link has two ends")
    if not args.kinds and not args.servers:
        parser.error("--kinds without any, and no --servers: nothing to measure")
    if args.largest_mib < 1 or args.repeats < 1:
        parser.error("--largest-mib and --repeats: expected 1 or more")
    if args.gpus and "RANK" not in os.environ and max(args.workers) > torch.cuda.device_count():
        n = torch.cuda.device_count()
        parser.error(f"--workers {max(args.workers)} --gpus: this machine has {n}")
    return args


def write_links(folder: Path, times: Sequence[Time], kappa: float) -> None:
    """`times.csv` and `links.csv`; kappa stands in the rows of the collectives."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "times.csv", _csv([f.name for f in fields(Time)], map(astuple, times)))
    rows = []
    for link in fitted_links(times):
        slowed = "" if link.kind == "push_pull" else f"{kappa:.4g}"
        rows.append([*asdict(link).values(), slowed])
    write_atomic(folder / "links.csv", _csv([*(f.name for f in fields(FittedLink)), "kappa"], rows))


def _csv(header: list[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


# --- collectives ----------------------------------------------------------------------------------


def measure_here(sweep: Sweep, on_gpus: bool) -> tuple[list[Time], float]:
    """`measure` by processes of this machine. Raises RuntimeError where one fails."""
    world = max(sweep.workers)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(sweep, rank, world, folder, on_gpus) for rank in range(world)]
        run_all([(_member, a) for a in arguments])
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return [Time(*t) for t in found["times"]], found["kappa"]


def _member(sweep: Sweep, rank: int, world: int, folder: str, on_gpus: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = dist.FileStore(f"{folder}/group", world)
    found = _in_group(sweep, on_gpus, rank, store=store, rank=rank, world_size=world)
    if rank == 0:
        times, kappa = found
        told = json.dumps({"times": [astuple(t) for t in times], "kappa": kappa})
        Path(folder, "found.json").write_text(told, encoding="utf-8")


def _as_one_of_many(sweep: Sweep, on_gpus: bool) -> tuple[list[Time], float] | None:
    """`measure` as a process that a launcher started; None but for rank 0."""
    rank = int(os.environ["RANK"])
    found = _in_group(sweep, on_gpus, int(os.environ.get("LOCAL_RANK", 0)), init_method="env://")
    return found if rank == 0 else None


def _in_group(sweep: Sweep, on_gpus: bool, number: int, **group: Any) -> tuple[list[Time], float]:
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
        found = measure(sweep, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pushed:
    """One measurement of servers: `workers` push weights of `n_bytes` by `transport`, in a round."""

    transport: str
    workers: int
    n_bytes: int
    repeat: int

    @property
    def pushes(self) -> int:
        """Of each worker, timed."""
        return max(FEWEST_PUSHES, min(MOST_PUSHES, PUSHED_BYTES // self.n_bytes))

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
    """Seconds between two pushes of a worker that computes nothing, by workers and bytes of the weights.

    One server and the workers, on this machine. All sizes, counts and transports (`tcp`, `shm`) are
    measured by the same processes, one after the other.
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
    """Seconds of a push while all workers push; one may have pushed more often than another."""
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


# --- processes of this machine --------------------------------------------------------------------


def run_all(work: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    """Run each function with its arguments in a process of its own, until all have ended.

    Raises RuntimeError where one fails, after ending the others.
    """
    context = forking()
    processes = [context.Process(target=function, args=args) for function, args in work]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            process.start()
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):
                break
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], 1.0)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if codes := [p.exitcode for p in processes if p.exitcode]:
        raise RuntimeError(f"a process of the measurement ended with code {codes[0]}")


def forking() -> ForkServerContext:
    """Of `multiprocessing`, a context whose processes have imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stratbench.train.links.timing", "stratbench.ps.server"])
    return context


if __name__ == "__main__":
    sys.exit(main())
