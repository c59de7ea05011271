"""The parameter-server strategies inside a cell: equal to the collectives where they must be, and what
the launcher makes of lost workers and servers. Real processes throughout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from process_groups import forking
from torch import nn

from launching import LIMIT_S, assert_gone, until
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.servers.policies.averaging import SyncPolicy
from stratbench.extensions.servers.policies.policies import make_policy
from stratbench.extensions.servers.ps import server_run
from stratbench.extensions.servers.ps.scale import LossScale
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.strategy import make_server_configs
from stratbench.extensions.servers.wire.handshake import make_secret, write_secret
from stratbench.strategies import get_option_defaults, get_strategy_class, resolve_options
from stratbench.strategies.base import Worker
from stratbench.train import forkserver
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.network.checkpointing import checkpoint_and_count_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GLOBAL_BATCH, CLASSES = 10, 8, 3
TOLERANCE = 1e-12
#: Strategies without look-ahead or sub-batches, and ps-dana: with one worker they are `single`.
EQUAL_ALONE = ["ps-sync", "ps-async", "ps-ssp", "ps-backup", "ps-kbatch", "ps-dcasgd",
               "ps-gap-aware", "ps-staleness-lr", "ps-dana", "ps-ormo"]  # fmt: skip


# ---------------------------------------------------------------- what the processes run


class SummingPolicy(SyncPolicy):
    """Mutant: the workers' gradients are summed."""

    def __init__(self, weights, hyper, options):
        super().__init__(weights, replace(hyper, lr=hyper.lr * hyper.workers), options)


class UnscheduledPolicy(SyncPolicy):
    """Mutant: the learning rate stays what it is."""

    lr = property(lambda self: self.hyper.lr)


def mutant_or_real(policy, weights, hyper, options):
    if policy == "summed":
        return SummingPolicy(weights, hyper, make_options())
    if policy == "cosine-unscheduled":
        return UnscheduledPolicy(weights, hyper, make_options())
    return make_policy(policy, weights, hyper, options)


def make_options():
    from stratbench.extensions.servers.policies.policies import parse_policy_options

    return parse_policy_options("ps-sync")


def network(batchnorm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.BatchNorm2d(5) if batchnorm else nn.Identity(),
            nn.ReLU(),
        ),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    ).double()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = STEPS * GLOBAL_BATCH
    y = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    return noise + (y.double() - 1).view(-1, 1, 1, 1), y


def settings(strategy: str, world: int, name: str = "") -> Settings:
    s = Settings(
        strategy=strategy, options=get_option_defaults(strategy), model="test", dataset="test",
        gpus=world, seed=0, epochs=1, global_batch=GLOBAL_BATCH,
        per_worker_batch=GLOBAL_BATCH // world, lr=0.1, momentum=0.9, weight_decay=1e-3,
        nesterov=strategy not in ("ps-dana",), precision="fp64", augment=False, warmup_steps=3,
        device="cpu", threads=1, slowdown=None,
    )  # fmt: skip
    if name.startswith("adamw"):
        s = replace(s, lr=0.01, optimizer="adamw", momentum=0.0, nesterov=False, betas=[0.9, 0.99],
                    eps=1e-8)  # fmt: skip
    if name.startswith("colocated"):
        s = replace(s, options=resolve_options(strategy, {"server_placement": "colocated"}, world))
    if "cosine" in name:
        s = replace(s, schedule="cosine", lr_warmup_steps=3, final_lr=0.01)
    return s


def train(name: str, base: str, rank: int, world: int, folder: Path, batchnorm: bool) -> dict:
    """Losses of this worker's steps, the final weights and evaluated float buffers."""
    torch.set_num_threads(1)
    x, y = samples()
    strategy = get_strategy_class(base)(
        get_strategy_class(base).Options(**get_option_defaults(base))
    )
    s = settings(base, world, name)
    if base == "single" and name.startswith("nesterov-off"):
        s = replace(s, nesterov=False)
    model = network(batchnorm)
    if name.startswith("recomputed"):
        assert checkpoint_and_count_blocks([("block", [model[0]])]) == 1
    if name.startswith("fp16"):
        s, model, x = replace(s, precision="fp16"), model.float(), x.float()
    worker = Worker(
        s, rank, world, world, torch.device("cpu"), RunFolder(folder), [], total_steps=STEPS
    )
    strategy.setup(model, worker)
    saved = strategy.save()
    strategy.step(x[:4], y[:4])  # a warm-up, which must leave no trace
    strategy.restore(saved)
    losses = []
    if strategy.kind == "server":
        for _, where in strategy.iter_tickets():
            if name == "same-slice":
                where = slice(where.start - where.start % GLOBAL_BATCH, None)
                where = slice(where.start, where.start + s.per_worker_batch)
            losses.append(strategy.step(x[where], y[where]))
        own = [b.clone() for b in model.buffers() if b.is_floating_point()]
        strategy.load_snapshot(0)
    else:
        order = torch.arange(STEPS * GLOBAL_BATCH)
        losses = [strategy.step(x[i], y[i]) for i in strategy.batches(order, 0)]
        own = []
    with strategy.open_evaluation_model() as evaluated:
        weights = [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in evaluated.parameters()
        ]
        buffers = [b.clone() for b in evaluated.buffers() if b.is_floating_point()]
    strategy.close()
    skipped = torch.tensor(strategy.report()["details"]["skipped_steps"])
    return {
        "losses": torch.stack(losses), "weights": weights, "buffers": buffers, "own": own,
        "skipped": skipped,
    }  # fmt: skip


def worker_process(runs: list[tuple], rank: int, world: int, folder: Path) -> None:
    if any(get_strategy_class(base).needs_group for _, base, _ in runs):
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    out = {}
    for name, base, batchnorm in runs:
        out[name, batchnorm] = train(
            name, base, rank, world, folder / f"{name}-{batchnorm}", batchnorm
        )
    torch.save(out, folder / f"out{rank}.pt")


def server_process(config_json: str, policy: str, folder: Path) -> None:
    from stratbench.extensions.servers.ps.server_config import ServerConfig
    from stratbench.extensions.servers.wire.handshake import load_secret

    config = replace(ServerConfig(**json.loads(config_json)), policy=policy)
    server_run.make_policy = mutant_or_real  # in this process only
    run_server(config, load_secret(RunFolder(folder).job_secret_path))


def run(runs: list[tuple[str, str, bool]], world: int, folder: Path) -> dict:
    """Results by (name, batchnorm): losses averaged over the workers, weights, buffers."""
    context = forking()
    processes = []
    for name, base, batchnorm in runs:
        own = folder / f"{name}-{batchnorm}"
        own.mkdir()
        if get_strategy_class(base).kind != "server":
            continue
        write_secret(RunFolder(own).job_secret_path, make_secret())
        policy = name if name in ("summed", "cosine-unscheduled") else base
        for config in make_server_configs(
            settings(base, world, name), STEPS * GLOBAL_BATCH, RunFolder(own), None
        ):
            arguments = (json.dumps(config.__dict__), policy, own)
            processes.append(context.Process(target=server_process, args=arguments))
    processes += [
        context.Process(target=worker_process, args=(runs, rank, world, folder))
        for rank in range(world)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(LIMIT_S)
    assert [p.exitcode for p in processes] == [0] * len(processes)
    ranks = [torch.load(folder / f"out{r}.pt", weights_only=True) for r in range(world)]
    results = {}
    for name, _, batchnorm in runs:
        each = [rank[name, batchnorm] for rank in ranks]
        one_per_step = len({len(e["losses"]) for e in each}) == 1
        results[name, batchnorm] = {
            "losses": torch.stack([e["losses"] for e in each]).mean(0) if one_per_step else None,
            "weights": each[0]["weights"],
            "buffers": each[0]["buffers"],
            "own": [e["own"] for e in each],
            "skipped": [int(e["skipped"]) for e in each],
        }
    return results


def distance(a: dict, b: dict, what: str) -> float:
    if what == "losses":
        return float((a["losses"] - b["losses"]).abs().max())
    return max(float((x - y).abs().max()) for x, y in zip(a[what], b[what], strict=True))


# ---------------------------------------------------------------- equality


@pytest.fixture(scope="module", params=[2, 4])
def together(request, tmp_path_factory) -> dict:
    runs = [
        ("ps-sync", "ps-sync", False), ("ddp", "ddp", False), ("summed", "ps-sync", False),
        ("same-slice", "ps-sync", False), ("ps-async", "ps-async", False),
        ("ps-sync", "ps-sync", True), ("ddp", "ddp", True), ("fsdp", "fsdp", True),
        ("fp16-ps-sync", "ps-sync", True), ("fp16-ddp", "ddp", True),
        ("adamw-ps-sync", "ps-sync", False), ("adamw-ddp", "ddp", False),
        ("cosine-ps-sync", "ps-sync", False), ("cosine-ddp", "ddp", False),
        ("cosine-unscheduled", "ps-sync", False), ("colocated", "ps-sync", True),
        ("recomputed-ps-sync", "ps-sync", True),
    ]  # fmt: skip
    return run(runs, request.param, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("batchnorm", [False, True])
def test_ps_sync_agrees_with_ddp(together, batchnorm):
    server, ddp = together["ps-sync", batchnorm], together["ddp", batchnorm]
    assert distance(server, ddp, "losses") <= TOLERANCE
    assert distance(server, ddp, "weights") <= TOLERANCE


def test_ps_sync_with_a_server_beside_each_worker_agrees_with_ddp(together):
    colocated = together["colocated", True]
    assert distance(colocated, together["ddp", True], "losses") <= TOLERANCE
    assert distance(colocated, together["ddp", True], "weights") <= TOLERANCE
    assert distance(colocated, together["ps-sync", True], "buffers") == 0


def test_blocks_computed_again_change_nothing(together):
    for what in ("losses", "weights", "buffers"):
        assert distance(together["recomputed-ps-sync", True], together["ps-sync", True], what) == 0


def test_ps_sync_agrees_with_ddp_in_adamw(together):
    """Weights of zero gradients are at the edge of rounding."""
    server, ddp = together["adamw-ps-sync", False], together["adamw-ddp", False]
    assert distance(server, ddp, "losses") <= TOLERANCE
    assert distance(server, ddp, "weights") <= 1e-9
    assert distance(server, together["ps-sync", False], "weights") > 1e-3  # it is another optimizer


def test_ps_sync_agrees_with_ddp_on_a_schedule(together):
    server, ddp, constant = (
        together[f"cosine-{n}", False] for n in ("ps-sync", "ddp", "unscheduled")
    )
    for what in ("losses", "weights"):
        assert distance(server, ddp, what) <= TOLERANCE
        assert distance(constant, ddp, what) > 1e-3


def test_ps_sync_agrees_with_ddp_in_fp16(together):
    """The loss scale is a power of two; what differs is the order of fp32 sums."""
    server, ddp = together["fp16-ps-sync", True], together["fp16-ddp", True]
    assert server["skipped"] == ddp["skipped"]
    assert distance(server, ddp, "losses") <= 1e-4
    assert distance(server, ddp, "weights") <= 1e-5
    assert distance(server, together["ps-sync", True], "weights") > 1e-5  # it is another precision


def test_the_servers_batchnorm_statistics_are_the_workers_mean(together):
    server, fsdp, ddp = (together[n, True] for n in ("ps-sync", "fsdp", "ddp"))
    # FSDP evaluates the mean of statistics that are never synchronised, which these are too.
    assert distance(server, fsdp, "buffers") <= TOLERANCE
    # DDP evaluates rank 0's, restarted from rank 0's each step: no further away than the workers are
    # from each other.
    own = torch.stack([torch.cat(worker) for worker in server["own"]])
    spread = float((own.max(0).values - own.min(0).values).max())
    assert 0 < distance(server, ddp, "buffers") <= spread


@pytest.mark.parametrize("mutant", ["summed", "same-slice", "ps-async"])
def test_a_mutant_does_not_agree(together, mutant):
    assert distance(together[mutant, False], together["ddp", False], "weights") > 1e-4


def test_one_worker_is_single_bit_for_bit(tmp_path):
    runs = [("single", "single", True), ("nesterov-off", "single", True)]
    runs += [(name, name, True) for name in EQUAL_ALONE]
    half = {"fp16-ps-sync": "ps-sync", "fp16-ps-async": "ps-async"}
    runs += [("fp16-single", "single", True), *((n, base, True) for n, base in half.items())]
    scheduled = ["ps-async", "ps-kbatch", "ps-ormo"]
    allowed = {"ps-ormo": TOLERANCE}  # it forms the same sums in another order
    runs += [(f"cosine-{name}", name, True) for name in ("single", *scheduled)]
    previewing = [
        ("adamw-ps-preview", "adamw-single"),
        ("adamw-cosine-ps-preview", "adamw-cosine-single"),
    ]
    runs += [
        (name, name.split("-", 1 + name.count("cosine"))[-1], True)
        for p in previewing
        for name in p
    ]
    results = run(runs, 1, tmp_path)
    # A shard is one tensor, torch's are many: rounding, as in AdamW above, and as each processor does it.
    for name, plain in previewing:
        for what, apart in (("losses", TOLERANCE), ("weights", 1e-9), ("buffers", 1e-9)):
            assert distance(results[name, True], results[plain, True], what) <= apart, (name, what)
    for name in scheduled:
        for what in ("losses", "weights"):
            pair = (results[f"cosine-{n}", True] for n in (name, "single"))
            assert distance(*pair, what) <= allowed.get(name, 0), name
    for name in half:
        for what in ("losses", "weights", "buffers"):
            assert distance(results[name, True], results["fp16-single", True], what) == 0, name
    for name in EQUAL_ALONE:
        plain = results["nesterov-off" if name == "ps-dana" else "single", True]
        for what in ("losses", "weights", "buffers"):
            assert distance(results[name, True], plain, what) <= allowed.get(name, 0), (name, what)


# ---------------------------------------------------------------- survival, through the launcher


def launch(
    folder: Path,
    strategy: str,
    gpus: int,
    epochs: int,
    warm: dict[str, str],
    program: tuple[str, ...] = ("-m", "stratbench.train.launch"),
    **changes: Any,
):
    """Start a real cell on synthetic data; returns the launcher's process and its paths.

    Its processes are forked by the server of the environment `warm`.
    """
    data = folder / "data"
    spec = {
        "source": "synthetic",
        "train_samples": 256,
        "test_samples": 64,
        "channels": 1,
        "size": 16,
    }
    meta = prepare_data_set("small", data, spec=spec)
    s = replace(
        settings(strategy, gpus), model="vgg-compact", dataset="small", epochs=epochs,
        global_batch=10 * gpus, per_worker_batch=10, lr=0.01, precision="fp32", nesterov=False,
        data_spec=meta["spec"], **changes,
    )  # fmt: skip
    cell = Cell("test", "served", strategy, "vgg-compact", "small", gpus, 0)
    record, logs = cell.record_path(folder), cell.log_dir(folder)
    command = [
        sys.executable, *program, "--cell", json.dumps(cell.as_dict()),
        "--settings", s.as_json(), "--data", str(data), "--record", str(record),
        "--timeline", str(record.with_name("timeline.csv")), "--logs", str(logs),
        "--time-limit-s", str(LIMIT_S),
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3] / "workflow"),
        forkserver.FOLDER_VARIABLE: warm[forkserver.FOLDER_VARIABLE],
    }
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return process, record, RunFolder.from_log_dir(logs)


def pid_of(folder: RunFolder, name: str) -> int:
    """The process `name` of the cell, once all its workers train."""

    def found() -> int | None:
        phases, pids = folder.list_phase_log_paths(), folder.get_pid_list_path(0)
        if not (phases and pids.exists() and all('"train"' in p.read_text() for p in phases)):
            return None
        known = dict(line.rsplit(" ", 1) for line in pids.read_text().splitlines())
        return int(known[name]) if len(phases) == sum(n.startswith("rank") for n in known) else None

    return until(found)


@pytest.fixture
def scratch(monkeypatch):
    """The temporary folder of what a test launches, with a name short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="sb-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


#: A step of it, and of its warm-up, takes seconds: it is killed in one of the first.
ASLEEP = {"slowdown": {"workers": [1], "factor": 2e2}, "warmup_steps": 1}


def test_a_killed_worker_does_not_bring_an_asynchronous_cell_down(tmp_path, warm, scratch):
    process, record, folder = launch(tmp_path, "ps-async", 3, epochs=5, warm=warm, **ASLEEP)
    os.kill(pid_of(folder, "rank1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    found = json.loads(record.read_text())
    assert found["status"] == "ok"
    [server] = found["server"]["servers"]
    assert [entry["worker"] for entry in server["lost"]] == [1]
    assert server["tickets_settled"] == 5 * 8 * 3
    assert len(found["score"]["per_epoch"]) == 5
    assert not folder.job_secret_path.exists(), "the job's secret is removed"
    left = [*tmp_path.rglob("epoch*"), *scratch.rglob("epoch*")]
    assert not left, "evaluated snapshots are removed"


def test_a_killed_worker_ends_a_synchronous_cell_with_its_name(tmp_path, warm):
    process, record, folder = launch(tmp_path, "ps-sync", 2, epochs=400, warm=warm)
    others = [psutil.Process(pid_of(folder, name)) for name in ("rank0", "server0")]
    os.kill(pid_of(folder, "rank1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "worker 1 was lost" in output
    assert "step " in output
    assert not record.exists()
    assert_gone(others)


def test_a_full_disk_fails_the_cell_with_that_reason(tmp_path, warm, scratch):
    process, record, _ = launch(tmp_path, "ps-async", 2, epochs=400, warm=warm)
    until(lambda: list(scratch.rglob("epoch*.json")))
    found = list(scratch.rglob("epoch*.json"))
    with contextlib.suppress(FileNotFoundError):  # the folder is gone: the cell has failed already
        for epoch in range(400):
            with contextlib.suppress(FileExistsError):
                found[0].with_name(f"epoch{epoch}.weights.0.part").symlink_to("/dev/full")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    failed = next(line for line in output.splitlines() if "FAILED" in line)
    assert "snapshot of epoch" in failed
    assert failed.endswith("No space left on device")
    assert not record.exists()
    assert not list(scratch.rglob("epoch*"))


def test_a_killed_server_ends_the_cell_with_an_error(tmp_path, warm):
    process, record, folder = launch(tmp_path, "ps-async", 2, epochs=400, warm=warm)
    os.kill(pid_of(folder, "server0"), signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "server0: killed by SIGKILL" in output
    assert not record.exists()


@pytest.mark.parametrize("strategy", ["ps-async", "ps-sync"])
def test_a_server_that_dies_with_the_worker_beside_it_ends_the_cell(tmp_path, warm, strategy):
    """As any lost server does: a part of the weights is gone, under every policy."""
    options = resolve_options(strategy, {"server_placement": "colocated"}, 3)
    process, record, folder = launch(tmp_path, strategy, 3, epochs=400, warm=warm, options=options)
    names = [f"{kind}{n}" for kind in ("server", "rank") for n in range(3)]
    processes = {name: psutil.Process(pid_of(folder, name)) for name in names}
    for name in ("server1", "rank1"):
        processes[name].kill()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "FAILED" in output
    assert any(
        reason in output for reason in ("worker 1 was lost", "server1: killed", "server 1 was lost")
    )
    assert not record.exists()
    assert_gone([*processes.values()])


#: The launcher, but its servers give a silent worker up sooner.
IMPATIENT = """
from dataclasses import replace
from stratbench.extensions.servers import node
from stratbench.train import launch

told = node.make_server_configs
node.make_server_configs = lambda *a: [replace(c, heartbeat_deadline_s=10.0) for c in told(*a)]
raise SystemExit(launch.main())
"""


def test_a_stopped_worker_is_given_up_and_ended(tmp_path, warm):
    process, record, folder = launch(
        tmp_path, "ps-async", 2, epochs=5, warm=warm, program=("-c", IMPATIENT), **ASLEEP
    )
    stopped = psutil.Process(pid_of(folder, "rank1"))
    stopped.suspend()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    found = json.loads(record.read_text())
    assert min(found["time"]["epoch_times_s"]) >= 0
    ends = [e["train_time_s"] for e in found["score"]["per_epoch"]]
    assert ends == sorted(ends)
    [server] = found["server"]["servers"]
    assert server["lost"][0]["reason"] == "no heartbeat for 10 s"
    assert_gone([stopped])


def test_a_loss_scale_halved_for_ever_stays_one():
    """A run that diverges in fp16 has no finite gradient ever again."""
    scale = LossScale()
    for _ in range(2000):
        scale.update(overflowed=True)
    assert scale.value == LossScale.MINIMUM > 0
    for _ in range(LossScale.GROWTH_STEPS):
        scale.update(overflowed=False)
    assert scale.value == 2 * LossScale.MINIMUM
