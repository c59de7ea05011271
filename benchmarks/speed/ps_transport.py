"""Compares the speed of our parameter server with one made with torch.distributed.rpc.

    python benchmarks/speed/ps_transport.py [--mb 1 100 550] [--workers 1 2 4] [--rounds 5]

The peer is torch's RPC parameter server ported to CPU tensors: one flat tensor, plain SGD under a
lock, `rpc_sync` from each worker. It runs in three forms. `rpc copy` returns a copy of the weights made
under the lock, as a server has to whose workers shall never see half an update; the server measured
here guarantees that for each shard. `rpc` is spared that copy: what it returns is sent while other workers'
updates go on. TensorPipe, which carries both, has faster ways than TCP within a host; `rpc tcp` is
`rpc` held to TCP. Each round runs every contender once, in alternating order, in fresh processes; a
ratio compares runs of the same round. The server's own TCP runs twice a round (`tcp`, `tcp again`):
the ratio of those two is what noise alone makes of 1.

Throughput is bytes both ways, of all workers, between the moment when the last worker has done its
warm-up and the moment when the first one runs out of work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))

from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.ps.server_config import ServerConfig

WARMUP = 3
#: What carries the peer's messages: what it chooses on one host, or TCP alone.
RPC_WIRES = {
    "rpc": {}, "rpc copy": {}, "rpc tcp": {"_transports": ["uv"], "_channels": ["basic"]},
}  # fmt: skip
CONTENDERS = ("rpc", "rpc copy", "rpc tcp", "tcp", "tcp again", "shm")
LR = 1e-3


def operations(mb: float) -> int:
    """Timed pushes per worker: enough to last, few enough to end."""
    return max(5, min(2000, int(2000 / mb)))


class RpcServer:
    """The peer's server."""

    instance: RpcServer

    def __init__(self, numel: int) -> None:
        self.weights = torch.zeros(numel)
        self.lock = threading.Lock()

    @staticmethod
    def push_pull(grad: Tensor, copied: bool) -> Tensor:
        """Apply a gradient; the new weights."""
        self = RpcServer.instance
        with self.lock:
            self.weights.add_(grad, alpha=-LR)
            return self.weights.clone() if copied else self.weights


def rpc_process(
    rank: int, n_workers: int, numel: int, ops: int, folder: Path, contender: str
) -> None:
    """Rank 0 is the server, 1..n_workers are workers."""
    warnings.filterwarnings("ignore", category=UserWarning)  # RPC's use of c10d is deprecated
    if rank == 0:
        RpcServer.instance = RpcServer(numel)
    else:
        torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store", rpc_timeout=120, **RPC_WIRES[contender]
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=n_workers + 1, rpc_backend_options=options)
    if rank:
        grad = torch.ones(numel)
        ends = []
        for _ in range(WARMUP + ops):
            rpc.rpc_sync("rank0", RpcServer.push_pull, args=(grad, contender == "rpc copy"))
            ends.append(time.monotonic())
        (folder / f"{rank}.json").write_text(json.dumps(ends), encoding="utf-8")
    rpc.shutdown()


def own_server(config: ServerConfig, secret: bytes) -> None:
    """The parameter server's process."""
    run_server(config, secret)


def own_worker(
    config: ServerConfig, secret: bytes, worker: int, numel: int, transport: str, folder: Path
) -> None:
    """A worker that computes nothing."""
    torch.set_num_threads(1)
    flat = FlatSpace(nn.ParameterList([torch.zeros(numel)]))
    flat.grads.fill_(1.0)
    channel = Channel.connect(config.rendezvous, worker, flat, secret, transport)
    ticket, ends = channel.wait_for_first_ticket(), []
    while ticket is not None:
        ticket = channel.push_pull()
        ends.append(time.monotonic())
    channel.close()
    (folder / f"{worker + 1}.json").write_text(json.dumps(ends), encoding="utf-8")


def processes(
    contender: str, n_workers: int, numel: int, ops: int, folder: Path, shard_bytes: int
) -> list[Any]:
    """The processes of one run, not yet started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.rpc"])
    if contender in RPC_WIRES:
        return [
            context.Process(
                target=rpc_process, args=(rank, n_workers, numel, ops, folder, contender)
            )
            for rank in range(n_workers + 1)
        ]
    secret = os.urandom(32)
    config = ServerConfig(
        rendezvous=str(folder / "rendezvous"),
        workers=n_workers,
        epochs=1,
        steps_per_epoch=WARMUP + ops,
        slices_per_step=n_workers,
        policy="ps-async",
        hyper={"lr": LR},
        shard_bytes=shard_bytes,
    )
    transport = contender.split()[0]
    return [context.Process(target=own_server, args=(config, secret))] + [
        context.Process(target=own_worker, args=(config, secret, w, numel, transport, folder))
        for w in range(n_workers)
    ]


def throughput(contender: str, mb: float, n_workers: int, shard_bytes: int) -> float:
    """GB/s of one run."""
    numel, ops = int(mb * 1e6 / 4), operations(mb)
    with tempfile.TemporaryDirectory() as folder:
        running = processes(contender, n_workers, numel, ops, Path(folder), shard_bytes)
        try:
            for process in running:
                process.start()
            for process in running:
                process.join(300)
            if any(process.exitcode != 0 for process in running):
                raise RuntimeError(f"{contender}: {[process.exitcode for process in running]}")
        finally:
            for process in running:
                process.kill()
        ends = [
            json.loads((Path(folder) / f"{rank + 1}.json").read_text(encoding="utf-8"))
            for rank in range(n_workers)
        ]
    start = max(times[WARMUP - 1] for times in ends)
    stop = min(times[-1] for times in ends)
    done = sum(start < t <= stop for times in ends for t in times)
    return done * 2 * numel * 4 / (stop - start) / 1e9


def compare(mb: float, n_workers: int, rounds: int, shard_bytes: int) -> dict[str, Any]:
    """All contenders, `rounds` times; GB/s and, round by round, ratios."""
    rates: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for number in range(rounds):
        for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            rates[contender].append(throughput(contender, mb, n_workers, shard_bytes))
    pairs = {
        "tcp/rpc tcp": ("tcp", "rpc tcp"),
        "tcp/rpc copy": ("tcp", "rpc copy"),
        "tcp/rpc": ("tcp", "rpc"),
        "shm/rpc": ("shm", "rpc"),
        "null": ("tcp again", "tcp"),
    }
    ratios = {
        name: [x / y for x, y in zip(rates[a], rates[b], strict=True)]
        for name, (a, b) in pairs.items()
    }
    return {"mb": mb, "workers": n_workers, "gb_per_s": rates, "ratios": ratios}


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


def markdown(results: list[dict[str, Any]]) -> str:
    """The table of medians and ranges."""
    rounds = len(results[0]["ratios"]["null"])
    lines = [
        "# Push + apply + pull, against torch's RPC",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {rounds} interleaved "
        "rounds, ratios paired by round: median (lowest to highest). `tcp again / tcp` is the null.",
        "",
        "`rpc copy`: the peer, returning a copy made under its lock, by what TensorPipe chooses within a "
        "host; `rpc`: the same, returning weights that may change while they are sent; `rpc tcp`: that, "
        "held to TCP.",
        "",
        "| MB | workers | rpc, GB/s | rpc copy | rpc tcp | tcp | shm | tcp / rpc tcp | tcp / rpc copy "
        "| tcp / rpc | shm / rpc | tcp again / tcp |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    shown = [name for name in CONTENDERS if name != "tcp again"]
    for r in results:
        rates = [f"{median(r['gb_per_s'][name]):.2f}" for name in shown]
        ratios = [f"{median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in r["ratios"].values()]
        lines.append(f"| {r['mb']:g} | {r['workers']} | {' | '.join([*rates, *ratios])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 100, 550])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shard-kib", type=int, default=ServerConfig.shard_bytes >> 10)
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parents[1] / "results",
        help="folder of the table",
    )
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    results = []
    for mb in arguments.mb:
        for n_workers in arguments.workers:
            result = compare(mb, n_workers, arguments.rounds, arguments.shard_kib << 10)
            results.append(result)
            rates = ", ".join(f"{k} {median(v):.2f}" for k, v in result["gb_per_s"].items())
            ratios = ", ".join(f"{k} {spread(v)}" for k, v in result["ratios"].items())
            print(f"{mb:g} MB, {n_workers} workers: {rates} GB/s; {ratios}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    arguments.out.mkdir(exist_ok=True)
    (arguments.out / "ps_transport.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
