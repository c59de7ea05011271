"""DeepSpeed's engine trains as DDP does, in fp32; is planned as it runs; and is asked for before any job.

`make test-deepspeed` runs all of it. Without DeepSpeed what needs it is skipped, and the reason says how to
install it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from process_groups import found_by_groups
from torch import Tensor, nn

from launching import ADAMW, each_strategy, settings
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.plan import check, fake, footprint
from stratbench.plan.request import Request
from stratbench.plan.trace import OperatorTrace
from stratbench.plan.traffic import wire_bytes
from stratbench.strategies import needs, option_defaults, strategy_class
from stratbench.strategies.base import Collective, Worker
from stratbench.strategies.ddp import DDP
from stratbench.strategies.deepspeed import DeepSpeed
from stratbench.study.config import Study
from stratbench.study.validation import validate
from stratbench.telemetry.collectives import CollectiveCall
from stratbench.workload import models, tasks
from stratbench.workload.gpt import GPT, Block
from stratbench.workload.trial import take_trial

ROOT = Path(__file__).parents[2]
#: Why what needs DeepSpeed is skipped; empty: it is here.
LACKING = " ".join(needs.faults("deepspeed", DeepSpeed))
with_deepspeed = pytest.mark.skipif(bool(LACKING), reason=LACKING)
slow = [pytest.mark.slow, pytest.mark.timeout(480), with_deepspeed]

CPU = torch.device("cpu")
STEPS, BATCH, VOCABULARY, POSITIONS, CLASSES = 6, 8, 7, 8, 3
#: How far losses and weights may be from DDP's where they are not equal bit for bit: other orders of sums.
NEAR = 2e-5
#: Ways to train: settings, and whether stages 1 and 2 on one and two workers do the same sums as DDP.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "schedule": ({"schedule": "cosine", "lr_warmup_steps": 2}, True),
    "adamw": (ADAMW, False),
    "parts": ({"accumulate": 2}, False),
    "clip": ({"clip_norm": 0.2}, False),
    "bf16": ({"precision": "bf16"}, True),
}
STAGES = (1, 2, 3)




def request_for(stage: int, model: str, workers: int, **changes: Any) -> Request:
    base = Request(
        strategy="deepspeed",
        options=tuple(sorted((option_defaults("deepspeed") | {"stage": stage}).items())),
        model=model,
        input_shape=(64,) if model == "gpt-compact" else (3, 32, 32),
        classes=10,
        world_size=workers,
        local_world=workers,
        eval_batch=16,
        precision="fp32",
        momentum=True,
        weight_decay=False,
        nesterov=False,
        on_cuda=False,
    )
    return replace(base, **changes)


# ---------------------------------------------------------------- what the processes run


class Alone(DeepSpeed):
    """A mutant: gradients stay each worker's own."""

    def backward(self, loss: Tensor) -> None:
        from deepspeed import comm

        reduce, comm.all_reduce = comm.all_reduce, lambda *_, **__: None
        try:
            super().backward(loss)
        finally:
            comm.all_reduce = reduce


class Added(DeepSpeed):
    """A mutant: the gradients of a batch's parts are added, not averaged."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.worker.settings.accumulate)


class Unclipped(DeepSpeed):
    """A mutant: nobody clips."""

    def config(self, worker: Worker) -> dict[str, Any]:
        return super().config(worker) | {"gradient_clipping": 0.0}


class Constant(DeepSpeed):
    """A mutant: the engine does not see the schedule."""

    def before_update(self) -> None: ...


class WarmedUp(DeepSpeed):
    """A mutant: the master copy, from which weights are updated, stays as the warm-up has left it."""

    def weights_and_buffers(self) -> list[Tensor]:
        return super().weights_and_buffers()[len(self.local) :]


MUTANTS: dict[str, tuple[type[DeepSpeed], str]] = {
    "alone": (Alone, "plain"),
    "added": (Added, "parts"),
    "unclipped": (Unclipped, "clip"),
    "constant": (Constant, "schedule"),
    "warmed-up": (WarmedUp, "plain"),
}


def network(kind: str) -> nn.Module:
    """Two, neither of which any number of workers divides evenly; the text's head is its embedding."""
    torch.manual_seed(0)
    if kind == "text":
        return GPT(VOCABULARY, POSITIONS, layers=2, heads=2, width=6)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.BatchNorm2d(5) if kind == "batchnorm" else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(180, 13),
        nn.ReLU(),
        nn.Linear(13, CLASSES),
    )


def samples(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "text":
        text = torch.randint(VOCABULARY, (2 * STEPS * BATCH, POSITIONS + 1), generator=generator)
        return text[:, :-1], text[:, 1:]
    y = torch.randint(CLASSES, (2 * STEPS * BATCH,), generator=generator)
    noise = torch.randn(len(y), 1, 6, 6, generator=generator)
    return noise + (y.float() - 1).view(-1, 1, 1, 1), y


def set_up(
    cls: type[Collective], options: dict[str, Any], kind: str, rank: int, world: int, **changed: Any
) -> Collective:
    strategy = cls(cls.Options(**options))
    s = replace(
        settings("deepspeed", gpus=world), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True,
        global_batch=BATCH, per_worker_batch=BATCH // world,
    )  # fmt: skip
    model = network(kind)
    wrapped = (Block, nn.Linear, nn.Conv2d) if kind != "text" else (Block,)
    groups = [(name, [m]) for name, m in model.named_modules() if isinstance(m, wrapped)]
    task = tasks.NextToken() if kind == "text" else tasks.Classification()
    strategy.setup(
        model,
        Worker(
            replace(s, **changed), rank, world, world, torch.device("cpu"), RunFolder(Path()), groups,
            task=task, total_steps=2 * STEPS,
        ),
    )  # fmt: skip
    return strategy


def whole_weights(strategy: Collective) -> Tensor:
    """All weights, one after the other."""
    if isinstance(strategy, DeepSpeed) and strategy.options.stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(strategy.model.parameters())):
            return torch.cat([p.detach().flatten() for p in strategy.model.parameters()])
    return torch.cat([p.detach().flatten() for p in strategy.model.parameters()])


def trajectory(
    cls: type[Collective], options: dict[str, Any], kind: str, rank: int, world: int, **way: Any
) -> dict[str, Any]:
    """Two epochs after a warm-up, each with an evaluation: losses [2 STEPS], weights, scores, what it sent."""
    strategy = set_up(cls, options, kind, rank, world, **way)
    x, y = samples(kind)
    own = BATCH // world
    saved = strategy.save()
    for _ in range(3):
        strategy.step(x[:own].flip(0), y[-own:])
    evaluated(strategy, x)
    strategy.restore(saved)
    losses = []
    for epoch in range(2):
        order = torch.arange(len(x))[epoch * STEPS * BATCH :]
        losses += [strategy.step(x[i], y[i]) for i in islice(strategy.batches(order, 0), STEPS)]
        scores = evaluated(strategy, x)
    together = torch.stack(losses).double()
    if world > 1:
        dist.all_reduce(together)
    return {
        "losses": together / world,
        "weights": whole_weights(strategy),
        "scores": scores,
        "sent": (strategy.communication() or {}).get("sent_bytes_per_step"),
        "states": strategy.model_states(),
        "report": strategy.report(),
    }


def evaluated(strategy: Collective, x: Tensor) -> Tensor:
    with strategy.evaluating() as model, torch.no_grad():
        model(x[:4])
        return model(x[4:8])


def statistics(stage: int, rank: int, world: int) -> dict[str, Tensor]:
    """BatchNorm's running means of all workers [world, 5] before, in and after an evaluation."""
    strategy = set_up(DeepSpeed, {"stage": stage}, "batchnorm", rank, world)
    x, y = samples("batchnorm")
    for i in islice(strategy.batches(torch.arange(len(x)), 0), STEPS):
        strategy.step(x[i], y[i])
    found = {"before": gathered(strategy, world)}
    with strategy.evaluating():
        found["in"] = gathered(strategy, world)
    return found | {"after": gathered(strategy, world)}


def gathered(strategy: Collective, world: int) -> Tensor:
    own = strategy.model[1].running_mean
    all_means = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(all_means, own)
    return torch.stack(all_means)


def as_it_runs(stage: int, model: str, rank: int, world: int) -> dict[str, Any]:
    """Of real steps, as the plan has them of fake ones: bytes at the peak and between, and what is sent."""
    request = request_for(stage, model, world)
    net = models.for_training(model, 10, request.input_shape, 0, CPU, torch.float32)
    strategy = fake.strategy_on_fakes(request)
    s = replace(fake.settings_of(request), per_worker_batch=8)
    worker = Worker(
        s, rank, world, world, CPU, RunFolder(Path()), models.wrap_groups(model, net),
        task=tasks.task_of(s, request.input_shape, False),
    )  # fmt: skip
    strategy.setup(net, worker)
    batch = fake.batch_of(request, 8)
    saved = strategy.save()
    for _ in range(3):
        strategy.step(*batch)
    sent = strategy._sent_bytes
    strategy.restore(saved)
    for _ in range(2):
        strategy.step(*batch)
        fake.evaluate(strategy, request)
    del saved, batch
    trace = OperatorTrace(on_cpu=True)
    fake._tag_states(trace, strategy, net)
    with trace:
        trace.begin("forward")
        strategy.step(*fake.batch_of(request, 8))
        trace.begin("evaluate")
    first, last = (phase.first for phase in trace.phases[1:])
    live = trace.live_bytes(first, last)
    states = strategy.model_states()
    return {"peak": max(live), "between": live[0], "sent": sent, "states": states}


def work(world: int, rank: int) -> dict[str, Any]:
    """All that a group of this size runs."""
    # A lock that a killed process has left behind, where the engine would wait for it.
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    (root / "deepspeed_shm_comm").mkdir(parents=True, exist_ok=True)
    (root / "deepspeed_shm_comm" / "lock").touch()
    found: dict[str, Any] = {}
    for kind in ("text", "images"):
        for way, (changed, _) in WAYS.items():
            if way != "plain" and (kind == "images" or world == 4):
                continue
            run = lambda cls, changed=changed, kind=kind, **options: trajectory(  # noqa: E731
                cls, options, kind, rank, world, **changed
            )
            found[f"{kind} {way} ddp"] = run(DDP)
            for stage in STAGES:
                found[f"{kind} {way} {stage}"] = run(DeepSpeed, stage=stage)
    for stage in STAGES:
        found[f"untuned {stage}"] = trajectory(
            DeepSpeed, {"stage": stage, "tuned": False}, "text", rank, world
        )
        if world == 2:
            found[f"statistics {stage}"] = statistics(stage, rank, world)
            for model in ("vgg-compact", "gpt-compact"):
                found[f"as it runs {stage} {model}"] = as_it_runs(stage, model, rank, world)
    if world == 2:
        for name, (cls, way) in MUTANTS.items():
            changed = WAYS[way][0]
            found[f"mutant {name}"] = trajectory(
                cls, {"stage": 2}, "text", rank, world, **changed
            )
    found["compiled"] = [str(p) for p in root.rglob("*") if p.suffix in (".so", ".o")]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("groups")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        return found_by_groups(work, folder, 400)


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """The largest relative difference of a loss, and that of the weights' distance to their norm."""
    losses = (one["losses"] - other["losses"]).abs() / other["losses"].abs()
    apart = torch.dist(one["weights"], other["weights"]) / other["weights"].norm()
    return float(losses.max()), float(apart)


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("kind", "way"), [("images", "plain"), *(("text", way) for way in WAYS)]
)
class TestAgreement:
    pytestmark = slow

    def test_every_stage_trains_as_ddp_does(self, found, kind, way, stage, world):
        """Bit for bit where the same numbers are summed up in the same order."""
        if way != "plain" and world == 4:
            pytest.skip("one way shows it")
        run, ddp = (found[world][f"{kind} {way} {name}"] for name in (stage, "ddp"))
        assert ddp["losses"].std() > 1e-3, "it does not learn: equality would say little"
        print(kind, way, stage, world, difference(run, ddp))
        if WAYS[way][1] and stage < 3 and world < 4:
            assert difference(run, ddp) == (0.0, 0.0)
            assert torch.equal(run["scores"], ddp["scores"])
        assert max(difference(run, ddp)) < NEAR
        assert run["report"]["updates_applied"] == 2 * STEPS
