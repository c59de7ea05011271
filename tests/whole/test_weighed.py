"""Losses that are a sum and a weight: whatever parts a batch comes in, its loss is that of the whole.

Every strategy that is exact trains a small transformer in real process groups, on texts of which many targets
do not count, and ends with the weights and losses of a plain loop over whole batches. Mutants must not.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_groups import WORLDS, found_by_groups
from ps_harness import Served

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.elastic.split import WeightedTask
from stratbench.extensions.servers.figures import compute_mean_epoch_loss
from stratbench.extensions.servers.loop import sum_batch_losses
from stratbench.extensions.servers.policies.averaging import SyncPolicy
from stratbench.extensions.servers.ps import server_run
from stratbench.extensions.servers.strategy import make_server_configs
from stratbench.extensions.servers.wire.handshake import load_secret, make_secret, write_secret
from stratbench.strategies import get_option_defaults, make_strategy
from stratbench.strategies.base import Strategy, Worker
from stratbench.strategies.ddp import DDP
from stratbench.telemetry.shards import gather_full_tensor
from stratbench.workload.network import models
from stratbench.workload.network.gpt import GPT
from stratbench.workload.tasks import NextToken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
VOCABULARY, POSITIONS, BATCH, STEPS = 7, 8, 16, 4
TOLERANCE = 1e-12
#: Stands for no token.
PADDING = 0


class Ignoring(NextToken):
    """Targets that are padding do not count."""

    def loss(self, outputs, targets):
        total = F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        return total, (targets != PADDING).sum()


class ByClass(NextToken):
    """Each class has a weight of its own, and one has none."""

    def loss(self, outputs, targets):
        weights = torch.arange(VOCABULARY).to(outputs) / 3
        flat = targets.flatten()
        total = F.cross_entropy(outputs.flatten(0, -2), flat, weight=weights, reduction="sum")
        return total, weights[flat].sum()


TASKS = {"ignoring": Ignoring, "by class": ByClass}


class OwnMean(DDP):
    """A mutant: the mean of the workers' means."""

    def average_target_weight_over_replicas(self, own):
        return own


class LastPart(DDP):
    """A mutant: the gradients of all parts are divided by the weight of the last."""

    def rescale_by_target_weight(self, loss, full):
        self.part_weights = self.part_weights[-1:]
        return super().rescale_by_target_weight(loss, full)


class EveryoneCounts(DDP):
    """A mutant: workers are taken for as many copies of the network more."""

    def average_target_weight_over_replicas(self, own):
        return super().average_target_weight_over_replicas(own) / 2


class Unweighed(SyncPolicy):
    """A mutant: each push weighs 1."""

    def on_push(self, worker, grad, read_version):
        self.push_weight = 1.0
        return super().on_push(worker, grad, read_version)


#: Of each: the strategy, its options, the parts of a batch, and on how many workers.
CASES: dict[str, tuple[str, dict[str, Any], int, tuple[int, ...]]] = {
    "single": ("single", {}, 1, (1,)),
    "single, in parts": ("single", {}, 4, (1,)),
    "ddp": ("ddp", {}, 1, WORLDS),
    "ddp, in parts": ("ddp", {}, 2, WORLDS),
    "fsdp": ("fsdp", {}, 1, WORLDS),
    "fsdp, in parts": ("fsdp", {}, 2, (2,)),
    "zero1": ("zero1", {}, 1, WORLDS),
    "zero1, in parts": ("zero1", {}, 2, (2,)),
    "zero1-torch": ("zero1-torch", {}, 1, (2,)),
    "tensor": ("tensor", {}, 1, (2,)),
    "tensor, pairs in parts": ("tensor", {"tensor_parallel_size": 2, "data_parallel": "ddp"}, 2, (4,)),
    "pipeline": ("pipeline", {"microbatches": 4}, 1, (2,)),
    "pipeline, pairs in parts": (
        "pipeline", {"microbatches": 2, "pipeline_parallel_size": 2}, 2, (4,)
    ),
    "ps-sync": ("ps-sync", {}, 1, WORLDS),
    "ps-async": ("ps-async", {}, 1, (1,)),
    "local-sgd": ("local-sgd", {}, 1, (1,)),
}  # fmt: skip
#: Mutants of a case: what takes whose place.
MUTANTS = {
    "ddp": (OwnMean, EveryoneCounts),
    "ddp, in parts": (LastPart,),
    "ps-sync": (Unweighed,),
}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of all steps: a third of the targets is padding, and all of some texts, workers and a step."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(VOCABULARY, (STEPS * BATCH, POSITIONS), generator=generator)
    y = torch.randint(1, VOCABULARY, (STEPS * BATCH, POSITIONS), generator=generator)
    lengths = torch.randint(POSITIONS + 1, (STEPS * BATCH, 1), generator=generator)
    y[torch.arange(POSITIONS) >= lengths] = PADDING
    y[: BATCH // 4] = PADDING  # all that the first of four workers has
    y[2 * BATCH : 3 * BATCH] = PADDING
    return x, y


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(VOCABULARY, POSITIONS, layers=2, heads=4, width=12, tied=True).double()


def settings_of(name: str, options: dict[str, Any], parts: int, world: int) -> Settings:
    options = get_option_defaults(name) | options
    s = settings(name, gpus=world, model="gpt-compact", options=options)
    replicas = make_strategy(name, options).mesh(world).replicas
    return replace(
        s, precision="fp64", lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True,
        gradient_accumulation_steps=parts,
        max_grad_norm=None if name.startswith("ps") else 0.2,
        global_batch=BATCH, per_worker_batch=BATCH // replicas,
    )  # fmt: skip


def set_up(strategy: Strategy, s: Settings, task: str, folder: RunFolder, rank: int) -> Worker:
    model = network()
    worker = Worker(
        s, rank, s.gpus, s.gpus, torch.device("cpu"), folder,
        models.list_shard_groups("gpt-compact", model), task=TASKS[task](), has_weighted_loss=True,
        mesh=strategy.mesh(s.gpus), total_steps=STEPS, input_shape=(POSITIONS,),
    )  # fmt: skip
    strategy.setup(model, worker)
    return worker


def trajectory(
    case: str, task: str, rank: int, world: int, mutant: type | None = None
) -> dict[str, Any]:
    """The mean of all losses, and the weights in the end, by name."""
    name, options, parts, _ = CASES[case]
    s = settings_of(name, options, parts, world)
    x, y = samples()
    strategy = make_strategy(name, s.options)
    if name.startswith("ps"):
        return served(strategy, s, task, rank, mutant)
    if mutant is not None:
        strategy = mutant(mutant.Options(**s.options))
    worker = set_up(strategy, s, task, RunFolder(Path()), rank)
    saved = strategy.save()
    strategy.step(x[: s.per_worker_batch].flip(0), y[-s.per_worker_batch :])
    strategy.restore(saved)
    batches = islice(strategy.batches(torch.arange(len(x)), 0), STEPS)
    losses = torch.stack([strategy.step(x[i], y[i]) for i in batches])
    if not worker.mesh.reports_replica_results(rank):
        losses.zero_()
    if world > 1:
        dist.all_reduce(losses)
    weights = {
        n: gather_full_tensor(p.detach()).clone() for n, p in strategy.model.named_parameters()
    }
    if worker.mesh.stages > 1:  # each of its own layers
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, weights)
        weights = {n: w for each in everyone for n, w in each.items()}
    return {"loss": losses.mean() / worker.mesh.replicas, "weights": weights}


def served(
    strategy: Strategy, s: Settings, task: str, rank: int, mutant: type | None
) -> dict[str, Any]:
    """The same with a server, on a thread of the first worker's process."""
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    folder = RunFolder(Path(where[0]))
    if rank == 0:
        write_secret(folder.job_secret_path, make_secret())
        with pytest.MonkeyPatch.context() as patch:
            if mutant is not None:
                make = lambda policy, weights, hyper, options: mutant(weights, hyper)  # noqa: E731
                patch.setattr(server_run, "make_policy", make)
            (config,) = make_server_configs(s, STEPS * BATCH, folder, None)
            server_thread = Served(config, load_secret(folder.job_secret_path))
            return worked(strategy, s, task, folder, rank, server_thread)
    return worked(strategy, s, task, folder, rank)


def worked(
    strategy: Strategy,
    s: Settings,
    task: str,
    folder: RunFolder,
    rank: int,
    server_thread: Served | None = None,
) -> dict[str, Any]:
    dist.barrier()
    set_up(strategy, s, task, folder, rank)
    x, y = samples()
    losses: dict[str, list[torch.Tensor]] = {}
    for _, where in strategy.iter_tickets():
        step = str(where.start // BATCH)
        losses.setdefault(step, []).append(strategy.step(x[where], y[where]))
    strategy.load_snapshot(0)
    told: list[Any] = [None] * s.gpus
    dist.all_gather_object(told, {n: sum_batch_losses(each) for n, each in losses.items()})
    weights = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
    strategy.close()
    if server_thread is not None:
        assert server_thread.result()["status"] == "ok"
    return {
        "loss": torch.tensor(compute_mean_epoch_loss(told), dtype=torch.float64),
        "weights": weights,
    }


def unequal_shares(rank: int, world: int) -> dict[str, Any]:
    """The same with workers of an elastic cell, whose shares of a batch need not be equal: 5 and 11."""
    s = settings_of("ddp", {}, 1, world)
    x, y = samples()
    strategy = make_strategy("ddp", s.options)
    worker = set_up(strategy, s, "ignoring", RunFolder(Path()), rank)
    worker.task = WeightedTask(worker.task)
    own = (slice(0, 5), slice(5, BATCH))[rank]
    worker.task.weight = world * (own.stop - own.start) / BATCH
    batches = zip(x.split(BATCH), y.split(BATCH), strict=True)
    losses = torch.stack([strategy.step(a[own], b[own]) for a, b in batches])
    dist.all_reduce(losses)
    weights = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
    return {"loss": losses.mean() / world, "weights": weights}


def tasks_of(case: str) -> list[str]:
    """The tasks of a case: whole batches of most, and one case in parts, have weights that are no counts."""
    counts = case in ("tensor", "zero1-torch") or ("parts" in case and case != "ddp, in parts")
    return ["ignoring"] if counts else [*TASKS]


def work(world: int, rank: int) -> dict[str, Any]:
    """Of each case and task, and of each mutant, the trajectory."""
    found: dict[str, Any] = {}
    for case, (_, _, _, worlds) in CASES.items():
        if world not in worlds:
            continue
        for task in tasks_of(case):
            found[f"{case}: {task}"] = trajectory(case, task, rank, world)
        for mutant in MUTANTS.get(case, ()) if world > 1 or "parts" in case else ():
            found[mutant.__name__] = trajectory(case, "ignoring", rank, world, mutant)
    if world == 2:
        found["unequal shares"] = unequal_shares(rank, world)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict[str, Any]]:
    return found_by_groups(work, tmp_path_factory.mktemp("weighed"))


def plain(task: str, clips: bool) -> dict[str, Any]:
    """A loop over whole batches, as anyone would write it."""
    model, learnt = network(), TASKS[task]()
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3, nesterov=True
    )
    losses = []
    for x, y in zip(*(t.split(BATCH) for t in samples()), strict=True):
        total, weight = learnt.loss(model(x), y)
        loss = total / weight if weight else 0.0 * total
        optimizer.zero_grad()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        losses.append(loss.detach())
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return {"loss": torch.stack(losses).mean(), "weights": weights}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["weights"].keys() == other["weights"].keys()
    weights = max(float((w - other["weights"][n]).abs().max()) for n, w in one["weights"].items())
    return max(weights, float((one["loss"] - other["loss"]).abs()))


@pytest.mark.parametrize(
    ("case", "task"), [(case, task) for case in CASES for task in tasks_of(case)]
)
def test_a_batch_in_parts_trains_as_the_whole(found, case, task):
    name, _, _, worlds = CASES[case]
    expected = plain(task, clips=not name.startswith("ps"))
    for world in worlds:
        assert distance(found[world][f"{case}: {task}"], expected) < TOLERANCE, world


def test_unequal_shares_of_a_batch_train_as_the_whole(found):
    assert distance(found[2]["unequal shares"], plain("ignoring", clips=True)) < TOLERANCE


@pytest.mark.parametrize("case", MUTANTS)
def test_mutants_are_seen(found, case):
    for mutant in MUTANTS[case]:
        for world in WORLDS:
            if mutant.__name__ in found[world]:
                one = found[world][mutant.__name__]
                assert distance(one, plain("ignoring", case != "ps-sync")) > 1e-4, mutant
