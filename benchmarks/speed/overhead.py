"""Compares our training loop, telemetry included, with a bare DDP loop and with popular trainers.

    python benchmarks/speed/overhead.py [--rounds 60]        writes benchmarks/results/overhead.{csv,md}

Two processes on this host, gloo, one thread each. All contenders train the same network on the same
batches, in blocks of equally many steps, all in the same processes; a round has one block of each,
in an order that rotates. A ratio compares blocks of one round; `bare again` is a second bare loop, so
its ratio is what noise alone makes of 1. Peers (Accelerate, Lightning) that are not installed are left
out; `pip install accelerate lightning` into an environment of their own adds them. Progress bars,
loggers and checkpoints of the peers are off, and batches reach them without a data loader.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import platform
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))

from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.cell.settings import Settings
from stratbench.strategies import get_option_defaults
from stratbench.strategies.base import Worker
from stratbench.strategies.ddp import DDP
from stratbench.telemetry.clock import StepClock
from stratbench.telemetry.sampler import Sampler
from stratbench.train.loop import run_timed_steps
from stratbench.workload.data.device_data import DeviceData, draw_epoch_order
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.network import models
from stratbench.workload.tasks import Classification, NextToken

OUT = Path(__file__).parents[1] / "results"
PEERS = {"accelerate": "accelerate", "fabric": "lightning", "trainer": "lightning"}
TRAINER_WARM_UP = 10


class Workload(NamedTuple):
    """What is trained on: its data set, its network and optimizer, and how much a block is."""

    title: str
    model: str  # of stratbench, or "mlp"
    input_shape: tuple[int, ...]
    classes: int
    dataset: dict[str, Any]  # as in config.yaml
    optimizer: dict[str, Any]  # settings
    batch: int  # samples of a process
    steps: int  # of a block: few, so that a round's blocks meet the same disturbances


IMAGES = {"source": "synthetic", "classes": 10, "channels": 1, "size": 28}
TEXTS = {"source": "markov-text", "vocabulary": 64, "sequence": 64}
SGD = {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9}
ADAMW = {
    "optimizer": "adamw", "lr": 0.001, "momentum": 0.0, "betas": (0.9, 0.999), "eps": 1e-8,
}  # fmt: skip
WORKLOADS = {
    "mlp": Workload("MLP, 50,890 parameters, SGD", "mlp", (1, 28, 28), 10, IMAGES, SGD, 32, 100),
    "conv": Workload("vgg-compact, SGD", "vgg-compact", (1, 32, 32), 10, IMAGES, SGD, 32, 20),
    "gpt": Workload("gpt-compact, fused AdamW", "gpt-compact", (64,), 64, TEXTS, ADAMW, 4, 10),
}


class Spent(NamedTuple):
    """What one block of steps took in one process."""

    wall_s: float
    cpu_s: float


def now() -> Spent:
    return Spent(time.perf_counter(), time.process_time())


#: Runs a block of steps; says itself what it took if setting up belongs in no figure.
Block = Callable[[], Spent | None]


class Setting(NamedTuple):
    """What all contenders train on, in one process."""

    workload: Workload
    data: DeviceData
    rank: int
    world: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        name, shape, classes = self.workload.model, self.workload.input_shape, self.workload.classes
        if name != "mlp":
            return models.build_model(name, classes, shape)
        inner = nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, classes)
        return nn.Sequential(nn.Flatten(), *inner)

    def batches(self) -> Iterator[Tensor]:
        """As `Collective.batches` hands them out."""
        order = draw_epoch_order(self.data.train_samples, 0, 0)
        yield from order.view(self.workload.steps, self.world, self.workload.batch)[:, self.rank]

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        of = self.workload.optimizer
        if of["optimizer"] == "adamw":
            return torch.optim.AdamW(parameters, lr=of["lr"], weight_decay=0.0, fused=True)
        return torch.optim.SGD(parameters, lr=of["lr"], momentum=of["momentum"])


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over images, or over the tokens of all texts."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


# --- contenders ----------------------------------------------------------------------------------


def bare(at: Setting) -> Block:
    module = DistributedDataParallel(at.model(), gradient_as_bucket_view=True)
    optimizer = at.make_optimizer(module.parameters())

    def block() -> None:
        losses = []
        for indices in at.batches():
            x, y = at.data.make_training_batch(indices)
            loss = loss_of(module(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())

    return block


def ours(at: Setting) -> Block:
    """The loop of a cell: the ddp strategy, the step clock with phase marks, DDP's own times."""
    s = Settings(
        strategy="ddp", options=get_option_defaults("ddp"), model="vgg-compact", dataset="synthetic",
        gpus=at.world, seed=0, epochs=1, global_batch=at.world * at.workload.batch,
        per_worker_batch=at.workload.batch, **at.workload.optimizer, weight_decay=0.0,
        nesterov=False, precision="fp32", augment=False, warmup_steps=3, device="cpu", threads=1,
        slowdown=None,
    )  # fmt: skip
    clock = StepClock("cpu")
    worker = Worker(
        s, at.rank, at.world, at.world, torch.device("cpu"), RunFolder(Path()), [],
        mark_phase_end=clock.mark_phase_end,
        task=NextToken() if len(at.workload.input_shape) == 1 else Classification(),
    )  # fmt: skip
    strategy = DDP(DDP.Options(**s.options))
    strategy.setup(at.model(), worker)
    return lambda: void(run_timed_steps(strategy, at.data, clock, at.batches()))


def void(_: Any) -> None:
    return None


def accelerate(at: Setting) -> Block:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    if accelerator.num_processes != at.world:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes, not {at.world}")
    model = at.model()
    module, optimizer = accelerator.prepare(model, at.make_optimizer(model.parameters()))
    return partial(launched_block, at, module, optimizer, accelerator.backward)


def fabric(at: Setting) -> Block:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    launched = Fabric(accelerator="cpu", devices=at.world, strategy=strategy)
    launched.launch()
    if launched.world_size != at.world:
        raise RuntimeError(f"Fabric sees {launched.world_size} processes, not {at.world}")
    model = at.model()
    module, optimizer = launched.setup(model, at.make_optimizer(model.parameters()))
    return partial(launched_block, at, module, optimizer, launched.backward)


def launched_block(
    at: Setting, module: nn.Module, optimizer: Any, backward: Callable[[Tensor], None]
) -> None:
    """The loop that Accelerate and Fabric ask for."""
    losses = []
    for indices in at.batches():
        x, y = at.data.make_training_batch(indices)
        loss = loss_of(module(x), y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())


class Batches:
    """A loader; the Trainer would take a list for a list of loaders."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def trainer(at: Setting) -> Block:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = at.model()

        def training_step(self, indices: Tensor, number: int) -> Tensor:
            x, y = at.data.make_training_batch(indices)
            return loss_of(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return at.make_optimizer(self.parameters())

    class Stamps(lightning.Callback):
        begun = ended = Spent(0, 0)

        def on_train_batch_start(self, trainer, module, batch, number) -> None:
            if number == TRAINER_WARM_UP:
                self.begun = now()

        def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
            if number == TRAINER_WARM_UP + at.workload.steps - 1:
                self.ended = now()

    module = Module()

    def block() -> Spent:
        batches = list(at.batches())
        stamps = Stamps()
        lightning.Trainer(
            accelerator="cpu",
            devices=at.world,
            strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
            max_epochs=1,
            callbacks=[stamps],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(module, Batches([*batches[:TRAINER_WARM_UP], *batches]))
        return Spent(*(b - a for a, b in zip(stamps.begun, stamps.ended, strict=True)))

    return block


CONTENDERS: dict[str, Callable[[Setting], Block]] = {
    "bare": bare,
    "ours": ours,
    "bare again": bare,
    "accelerate": accelerate,
    "fabric": fabric,
    "trainer": trainer,
}


# --- measuring -----------------------------------------------------------------------------------


def work(
    rank: int, world: int, port: int, folder: str, names: list[str], rounds: int, sampler: int
) -> None:
    """One of the processes: all rounds of all workloads; leaves a line for each block."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "NODE_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    models.import_torchvision()  # Lightning imports it too, and would not survive a broken one
    dist.init_process_group("gloo")
    with Path(folder, f"blocks{rank}.jsonl").open("w", encoding="utf-8") as out:
        for trained, workload in WORKLOADS.items():
            data = DeviceData.load_prepared_data_set(
                Path(folder, trained), torch.device("cpu"), workload.input_shape
            )
            at = Setting(workload, data, rank, world)
            blocks = {name: CONTENDERS[name](at) for name in names}
            for name in list(logging.root.manager.loggerDict):
                if "lightning" in name:
                    logging.getLogger(name).setLevel(logging.ERROR)
            for number in range(-1, rounds):  # the first warms up
                shift = number % len(names)
                for name in names[shift:] + names[:shift]:
                    line = measured(blocks[name], sampler if name == "ours" and not rank else 0)
                    if number >= 0:
                        line |= {"workload": trained, "round": number, "contender": name}
                        out.write(json.dumps(line) + "\n")
    dist.barrier()
    out.close()
    os._exit(0)  # peers leave threads and exit handlers of their own


def measured(block: Block, sampler: int) -> dict[str, float]:
    """One block; the sampler (process id, 0: none) runs meanwhile and not otherwise."""
    if sampler:
        os.kill(sampler, signal.SIGCONT)
    sampled_s = cpu_s_of(sampler)
    dist.barrier()
    begun = now()
    own = block()
    ended = now()
    spent = own or Spent(*(b - a for a, b in zip(begun, ended, strict=True)))
    sampled_s = cpu_s_of(sampler) - sampled_s
    if sampler:
        os.kill(sampler, signal.SIGSTOP)
    dist.barrier()
    return {"wall_s": spent.wall_s, "cpu_s": spent.cpu_s, "sampler_cpu_s": sampled_s}


def cpu_s_of(pid: int) -> float:
    """CPU time of another process by the scheduler's own sum, 0 without one."""
    return (
        int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
        if pid
        else 0.0
    )


def run(names: list[str], rounds: int, world: int) -> list[dict[str, Any]]:
    """All blocks, each as the mean of its processes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        for name, workload in WORKLOADS.items():
            samples = workload.steps * world * workload.batch
            spec = workload.dataset | {"train_samples": samples, "test_samples": 1}
            prepare_data_set("made", Path(folder, name), spec=spec)
        port = free.getsockname()[1]
        free.close()
        run_folder = RunFolder(Path(folder))
        sampler = Sampler(
            run_folder.get_timeline_samples_path(0), run_folder.get_pid_list_path(0), time.time()
        )
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(
                target=work, args=(r, world, port, folder, names, rounds, sampler.pid), daemon=True
            )
            for r in range(world)
        ]
        try:
            for rank, process in enumerate(processes):
                process.start()
                sampler.watch_process(format_worker_name(rank), process.pid)
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
            os.kill(sampler.pid, signal.SIGCONT)
            sampler.stop()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a process failed: exit codes {[p.exitcode for p in processes]}")
        ranks = [
            [
                json.loads(line)
                for line in Path(folder, f"blocks{r}.jsonl")
                .read_text(encoding="utf-8")
                .splitlines()
            ]
            for r in range(world)
        ]
    return [merged(parts) for parts in zip(*ranks, strict=True)]


def merged(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Of a step: mean wall and CPU time of a process, and the sampler's share of one process."""
    steps = WORKLOADS[parts[0]["workload"]].steps
    per_step = 1 / len(parts) / steps
    return {
        **{key: parts[0][key] for key in ("workload", "round", "contender")},
        "step_ms": 1e3 * per_step * sum(p["wall_s"] for p in parts),
        "cpu_us": 1e6 * per_step * sum(p["cpu_s"] + p["sampler_cpu_s"] for p in parts),
        "sampler_cpu_us": 1e6 * per_step * sum(p["sampler_cpu_s"] for p in parts),
    }


# --- the result ----------------------------------------------------------------------------------


def interval(values: list[float]) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    from scipy.stats import bootstrap

    found = bootstrap((values,), median_of, method="percentile", n_resamples=5000, rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def median_of(values: Any, axis: int = -1) -> Any:
    import numpy as np

    return np.median(values, axis=axis)


def summary(blocks: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """A row for each workload and contender; differences and ratios are to the round's bare block."""
    rows = []
    for workload in WORKLOADS:
        of = {(b["contender"], b["round"]): b for b in blocks if b["workload"] == workload}
        rounds = sorted({number for _, number in of})
        for name in names:
            pairs = [(of[name, r], of["bare", r]) for r in rounds]
            row: dict[str, Any] = {"workload": workload, "contender": name, "rounds": len(rounds)}
            for key in ("step_ms", "cpu_us", "sampler_cpu_us"):
                row[key] = median(mine[key] for mine, _ in pairs)
            compared = {
                "step_ratio": [mine["step_ms"] / its["step_ms"] for mine, its in pairs],
                "cpu_ratio": [mine["cpu_us"] / its["cpu_us"] for mine, its in pairs],
                "cpu_added_us": [mine["cpu_us"] - its["cpu_us"] for mine, its in pairs],
            }
            for key, values in compared.items():
                row[key] = median(values)
                if name != "bare":
                    row[f"{key}_low"], row[f"{key}_high"] = interval(values)
            rows.append(row)
    return rows


def page(
    rows: list[dict[str, Any]], missing: list[str], load: tuple[float, float], world: int
) -> str:
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "accelerate", "lightning")
        if importlib.util.find_spec(name)
    ]
    who = "1 process of one thread" if world == 1 else f"{world} processes of one thread each"
    lines = [
        "# Overhead of the training loop",
        "",
        f"{who} on {platform.machine()}, {os.cpu_count()} cores, gloo; "
        f"{', '.join(versions)}, Python {platform.python_version()}. Load (1 minute) {load[0]:.1f} at "
        f"the start, {load[1]:.1f} at the end: {'nothing else ran' if load[0] < 0.5 else 'busy'}. "
        f"Medians of {rows[0]['rounds']} interleaved rounds with bootstrap 95 % intervals; ratios and "
        "differences are to the bare DDP loop's block of the same round, so `bare again` shows the "
        "noise. CPU time is that of a process and all its threads, in `ours` with its share of the "
        "sampler's. Made by `benchmarks/speed/overhead.py`.",
        "",
    ]
    if missing:
        lines += [
            f"Not compared (not installed, or does without DDP in one process): {', '.join(missing)}.",
            "",
        ]
    for name, workload in WORKLOADS.items():
        lines += [
            f"## {name}: {workload.title}, batch {workload.batch} a process",
            "",
            "| loop | step, ms | step / bare | CPU a step, us | CPU added, us | CPU / bare |",
            "|---|---|---|---|---|---|",
        ]
        for row in (r for r in rows if r["workload"] == name):
            cells = [row["contender"], f"{row['step_ms']:.2f}", shown(row, "step_ratio", ".3f")]
            cells += [f"{row['cpu_us']:.0f}", shown(row, "cpu_added_us", "+.0f")]
            cells += [shown(row, "cpu_ratio", ".3f")]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def shown(row: dict[str, Any], key: str, how: str) -> str:
    if f"{key}_low" not in row:
        return "–"
    return f"{row[key]:{how}} ({row[f'{key}_low']:{how}} to {row[f'{key}_high']:{how}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2, help="1: least disturbed by other load")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the results")
    args = parser.parse_args()
    missing = [name for name, package in PEERS.items() if not importlib.util.find_spec(package)]
    for name in missing:
        print(f"{name}: {PEERS[name]} is not installed; left out", file=sys.stderr)
    if args.processes == 1:
        missing.append("accelerate")  # alone it does without DistributedDataParallel
    names = [name for name in CONTENDERS if name not in missing]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up: the sampler may be stopped
    load_before = os.getloadavg()[0]
    blocks = run(names, args.rounds, args.processes)
    rows = summary(blocks, names)
    args.out.mkdir(parents=True, exist_ok=True)
    text = page(rows, missing, (load_before, os.getloadavg()[0]), args.processes)
    name = "overhead" if args.processes == 2 else f"overhead-{args.processes}-process"
    (args.out / f"{name}.md").write_text(text, encoding="utf-8")
    with (args.out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    print(text)


if __name__ == "__main__":
    main()
