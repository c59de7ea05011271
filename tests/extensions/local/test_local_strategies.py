"""Workers that train by themselves: against a slow reference, against one process, and on the wire.

Each group of processes is started once and runs everything that needs its size. Mutants (one mistake
each) go through the same comparison and must fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import WORLDS, found_by_groups
from torch import Tensor, nn

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.local.diloco import DiLoCo
from stratbench.extensions.local.gossip import Gossip
from stratbench.extensions.local.local_sgd import LocalSGD
from stratbench.strategies import get_option_defaults, get_strategy_class
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.telemetry.memory import get_optimizer_state
from stratbench.workload.network.gpt import GPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GLOBAL_BATCH, CLASSES = 10, 8, 3
TOLERANCE = 1e-12
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}
PLAIN = {"lr": 0.1, "momentum": 0.0, "weight_decay": 1e-3}
ADAMW = {"optimizer": "adamw", "momentum": 0.0, "betas": [0.9, 0.99], "eps": 1e-8, "lr": 0.01,
         "weight_decay": 1e-2}  # fmt: skip

# ---------------------------------------------------------------- mutants


class NeverTheLast(LocalSGD):
    """Mutant: what is left of a period is not averaged."""

    def is_exchange_due(self, period: int, start: int = 0) -> bool:
        return (self.steps - start) % period == 0


class OwnGradients(LocalSGD):
    """Mutant: before `start` each worker goes by its own gradient."""

    def assign_gradients_to_updated_tensors(self) -> None: ...


class HeavyBall(DiLoCo):
    """Mutant: the outer momentum does not look ahead."""

    def exchange_weights(self) -> None:
        before = [t.clone() for t in self.outer]
        super().exchange_weights()
        if self.is_exchange_due(self.options.inner_steps):
            for flat, outer, then, m in zip(
                self.weights, self.outer, before, self.momenta, strict=True
            ):
                flat.copy_(outer.copy_(then - self.options.outer_lr * m))


class OneSided(Gossip):
    """Mutant: who has two neighbours counts the first one twice."""

    def exchange_weights(self) -> None:
        own = [t.clone() for t in self.weights]
        super().exchange_weights()
        if self.neighbours:
            for flat, before, received in zip(
                self.weights, own, self.received.values(), strict=True
            ):
                flat.copy_((before + 2 * received[0]) / 3)


#: name: class, options, settings, the optimizer's, and whether it is one process at the global batch.
RUNS: dict[str, tuple[type[Collective], dict[str, Any], dict[str, Any], bool]] = {
    "local-1": (LocalSGD, {"period": 1}, SGD, True),
    "local-4": (LocalSGD, {"period": 4}, SGD, False),
    "local-4-adamw": (LocalSGD, {"period": 4}, ADAMW | {"max_grad_norm": 0.2}, False),
    "local-late": (LocalSGD, {"period": 3, "start": 4}, SGD, False),
    "local-never": (LocalSGD, {"start": STEPS}, ADAMW | {"max_grad_norm": 0.2}, True),
    "diloco-1": (
        DiLoCo, {"inner_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}, PLAIN, True,
    ),
    "diloco-nesterov": (DiLoCo, {"inner_steps": 1, "outer_lr": 1.0}, PLAIN, False),
    "diloco-4": (DiLoCo, {"inner_steps": 4}, ADAMW, False),
    "gossip": (Gossip, {}, SGD, False),
    "gossip-parts": (Gossip, {}, SGD | {"gradient_accumulation_steps": 2, "schedule": "cosine"}, False),
}  # fmt: skip
MUTANTS = {
    "never-the-last": (NeverTheLast, {"period": 4}, SGD, "local-4"),
    "own-gradients": (OwnGradients, {"period": 3, "start": 4}, SGD, "local-late"),
    "heavy-ball": (HeavyBall, {"inner_steps": 4}, ADAMW, "diloco-4"),
    "one-sided": (OneSided, {}, SGD, "gossip"),
}


def network() -> tuple[nn.Module, Tensor, Tensor]:
    """Convolutions with BatchNorm, and images that are brighter the higher the label."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    )
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (STEPS * GLOBAL_BATCH,), generator=generator)
    noise = torch.randn(len(y), 1, 6, 6, generator=generator, dtype=torch.float64)
    return model.double(), noise + (y.double() - 1).view(-1, 1, 1, 1), y


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """A text model whose head is its embedding."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(7, (STEPS * GLOBAL_BATCH, 6), generator=generator)
    return GPT(7, 5, layers=1, heads=2, width=6).double(), text[:, :-1], text[:, 1:]


def settings_of(cls: type[Collective], options: dict[str, Any], given: dict[str, Any], world: int):
    name = {LocalSGD: "local-sgd", DiLoCo: "diloco", Gossip: "gossip"}
    base = next((n for c, n in name.items() if issubclass(cls, c)), "single")
    return settings(
        base,
        **given,
        options=get_option_defaults(base) | options,
        gpus=world,
        global_batch=GLOBAL_BATCH,
        per_worker_batch=GLOBAL_BATCH // world,
        precision="fp64",
    )


def set_up(
    cls: type[Collective], options: dict[str, Any], given: dict[str, Any], rank: int, world: int,
    model: nn.Module,
) -> Collective:  # fmt: skip
    s = settings_of(cls, options, given, world)
    strategy = cls(cls.Options(**s.options))
    folder = RunFolder(Path())
    strategy.setup(
        model, Worker(s, rank, world, world, torch.device("cpu"), folder, [], total_steps=STEPS)
    )
    return strategy


def train(strategy: Collective, x: Tensor, y: Tensor, steps: int = STEPS) -> None:
    for i in islice(strategy.batches(torch.arange(len(x)), 0), steps):
        strategy.step(x[i], y[i])


# ---------------------------------------------------------------- the slow reference


def reference(name: str, world: int, workload: Callable) -> list[Tensor]:
    """The workers' weights after the run, [workers, weights], by plain loops over whole models."""
    cls, options, given, _ = RUNS[name]
    options = get_option_defaults(settings_of(cls, options, given, world).strategy) | options
    model, x, y = workload()
    alone = get_strategy_class("single")
    workers = [set_up(alone, {}, given, 0, 1, deepcopy(model)) for _ in range(world)]
    share = GLOBAL_BATCH // world
    period = options.get("period", options.get("inner_steps", 1))
    outer, momentum = flat(model), torch.zeros_like(flat(model))
    for step in range(STEPS):
        averaging = step < options.get("start", 0)
        linked = []
        for rank, worker in enumerate(workers):
            part = slice(
                step * GLOBAL_BATCH + rank * share, step * GLOBAL_BATCH + (rank + 1) * share
            )
            if averaging:  # all backward passes first: by then each holds the gradient of its part
                worker.assign_gradients_to_updated_tensors = Stop()
                with pytest.raises(StopHere):
                    worker.step(x[part], y[part])
                linked.append([p.grad.clone() for p in worker.parameters])
            else:
                worker.step(x[part], y[part])
        if averaging:
            for worker in workers:
                for p, *grads in zip(worker.parameters, *linked, strict=True):
                    p.grad = sum(grads) / world
                worker.prepare_update()
                worker.optimizer.step()
                worker.optimizer.zero_grad()
                worker.steps += 1
                worker.assign_gradients_to_updated_tensors = lambda: None
            mix_statistics(workers)
            continue
        after = torch.stack([flat(w.model) for w in workers])
        if cls is Gossip:
            around = torch.eye(world, dtype=torch.float64)
            for rank in range(world):
                for other in {(rank - 1) % world, (rank + 1) % world}:
                    around[rank, other] = 1
            mixed = around / around.sum(1, keepdim=True)
            load(workers, mixed @ after)
            mix_statistics(workers, mixed)
            continue
        since = step + 1 - options.get("start", 0)
        if since % period and step + 1 < STEPS:
            continue
        mean = after.mean(0)
        if cls is DiLoCo:
            mu = options["outer_momentum"]
            momentum = mu * momentum + (outer - mean)
            outer = outer - options["outer_lr"] * (outer - mean + mu * momentum)
            mean = outer
        load(workers, mean.expand(world, -1))
        mix_statistics(workers)
    return torch.stack([flat(w.model) for w in workers])


class StopHere(Exception):
    """Raised where the reference leaves a worker's step."""


class Stop:
    def __call__(self) -> None:
        raise StopHere


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def statistics(model: nn.Module) -> list[Tensor]:
    return [b for b in model.buffers() if b.is_floating_point()]


def load(workers: list[Collective], rows: Tensor) -> None:
    for worker, row in zip(workers, rows, strict=True):
        parts = row.split([p.numel() for p in worker.model.parameters()])
        for p, part in zip(worker.model.parameters(), parts, strict=True):
            p.data.copy_(part.view_as(p))


def mix_statistics(workers: list[Collective], mixed: Tensor | None = None) -> None:
    world = len(workers)
    mixed = torch.full((world, world), 1 / world, dtype=torch.float64) if mixed is None else mixed
    for same in zip(*(statistics(w.model) for w in workers), strict=True):
        for b, new in zip(same, mixed @ torch.stack(same), strict=True):
            b.copy_(new)


# ---------------------------------------------------------------- what the processes run


class Wire:
    """Bytes that this rank sends by all-reduces (as a ring does it) and to single ranks."""

    def __init__(self, world: int) -> None:
        self.world, self.sent_bytes = world, 0.0
        self._reduce, self._batch = dist.all_reduce, dist.batch_isend_irecv

    def __enter__(self) -> Wire:
        dist.all_reduce, dist.batch_isend_irecv = self._all_reduce, self._send_and_receive
        return self

    def __exit__(self, *error: Any) -> None:
        dist.all_reduce, dist.batch_isend_irecv = self._reduce, self._batch

    def _all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent_bytes += 2 * (self.world - 1) / self.world * tensor.nbytes
        return self._reduce(tensor, *args, **kwargs)

    def _send_and_receive(self, operations: list[dist.P2POp]) -> Any:
        self.sent_bytes += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return self._batch(operations)


def gathered(tensor: Tensor, world: int) -> Tensor:
    """`tensor` of every rank, [world, ...]."""
    out = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(out, tensor.contiguous())
    return torch.stack(out)


def run(
    cls: type[Collective], options: dict[str, Any], given: dict[str, Any], rank: int, world: int,
    workload: Callable,
) -> dict[str, Any]:  # fmt: skip
    """A warm-up that must leave no trace, then the run."""
    model, x, y = workload()
    strategy = set_up(cls, options, given, rank, world, model)
    saved = strategy.save()
    train(strategy, x.flip(0), y, 2)
    with strategy.open_evaluation_model() as evaluated, torch.no_grad():
        evaluated(x[:4])
    strategy.restore(saved)
    with Wire(world) as wire:
        train(strategy, x, y)
    own, stats = flat(model), [b.clone() for b in statistics(model)]
    with strategy.open_evaluation_model() as evaluated, torch.no_grad():
        mean = flat(evaluated)
        held = [b.clone() for b in statistics(evaluated)]
    kept = sum(
        t.nbytes
        for entry in get_optimizer_state(strategy.optimizer).values()
        for t in entry.values()
    )
    kept += sum(t.nbytes for t in strategy.extra_state())
    exchanged_bytes = sum(t.nbytes for t in strategy.exchanged_tensors)
    return {
        "weights": gathered(own, world),
        "evaluated": gathered(mean, world),
        "unchanged": torch.equal(flat(model), own)
        and all(torch.equal(a, b) for a, b in zip(statistics(model), stats, strict=True)),
        "statistics": [gathered(b, world) for b in stats],
        "evaluated_statistics": held,
        "sent": wire.sent_bytes / STEPS,
        "said": strategy.communication(),
        "exchanges": strategy.count_exchanges(STEPS),
        "exchanged_bytes": exchanged_bytes,
        "states": strategy.compute_model_state_bytes(),
        "kept_bytes": kept,
        "report": strategy.report(),
    }


def work(world: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (cls, options, given, _) in RUNS.items():
        for workload in (network, transformer):
            if (
                given.get("gradient_accumulation_steps", 1) == 1
                or GLOBAL_BATCH // world > 2
                or workload is transformer
            ):
                found[name, workload.__name__] = run(cls, options, given, rank, world, workload)
    for name, (cls, options, given, _) in MUTANTS.items() if world == 4 else ():
        found[name] = run(cls, options, given, rank, world, transformer)
    found["drift"] = drift(rank, world)
    return found


def drift(rank: int, world: int) -> float:
    """By how much the mean of all workers moves in gossip's exchanges, at most."""
    model, x, y = transformer()
    strategy = set_up(Gossip, {}, SGD, rank, world, model)
    exchange, most = strategy.exchange_weights, 0.0

    def watched() -> None:
        nonlocal most
        before = gathered(flat(model), world).mean(0)
        exchange()
        most = max(most, float((gathered(flat(model), world).mean(0) - before).abs().max()))

    strategy.exchange_weights = watched
    train(strategy, x, y)
    return most


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What groups of 1, 2 and 4 processes found, by size."""
    return found_by_groups(work, tmp_path_factory.mktemp("groups"))


def runs(found: dict[int, dict[str, Any]], world: int) -> Iterator[tuple[str, Callable, Any]]:
    for name in RUNS:
        for workload in (network, transformer):
            if (name, workload.__name__) in found[world]:
                yield name, workload, found[world][name, workload.__name__]


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("world", WORLDS)
def test_every_worker_is_where_the_slow_reference_has_it(found, world):
    for name, workload, run in runs(found, world):
        expected = reference(name, world, workload)
        loose = 1e-9 if RUNS[name][2].get("optimizer") == "adamw" else TOLERANCE
        assert difference(run["weights"], expected) <= loose, (name, workload.__name__)
        assert difference(flat(workload()[0]), expected) > 1e-3


def test_a_strategy_with_a_mistake_is_not_there(found):
    for mutant, (*_, name) in MUTANTS.items():
        expected = reference(name, 4, transformer)
        assert difference(found[4][mutant]["weights"], expected) > 1e-6, mutant


@pytest.mark.parametrize("world", [2, 4])
def test_averaged_after_every_step_it_is_one_process_at_the_global_batch(found, world):
    for name in (n for n, (*_, equal) in RUNS.items() if equal or (n, world) == ("gossip", 2)):
        model, x, y = transformer()
        train(set_up(get_strategy_class("single"), {}, RUNS[name][2], 0, 1, model), x, y)
        loose = 1e-9 if RUNS[name][2].get("optimizer") == "adamw" else TOLERANCE
        ours = found[world][name, "transformer"]["weights"]
        assert difference(ours, flat(model)) <= loose, name
    far = found[world]["local-4", "transformer"]["weights"]
    assert difference(far, found[world]["local-1", "transformer"]["weights"]) > 1e-6


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_outer_step_after_every_step_is_nesterovs_sgd(found, world):
    model, x, y = transformer()
    given = PLAIN | {"momentum": 0.9, "nesterov": True}
    train(set_up(get_strategy_class("single"), {}, given, 0, 1, model), x, y)
    ours = found[world]["diloco-nesterov", "transformer"]["weights"]
    assert difference(ours, flat(model)) <= TOLERANCE


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_sent_is_what_is_said_and_what_the_plan_takes_it_for(found, world):
    for name, _, run in runs(found, world):
        said = run["said"]["sent_bytes_per_step"]
        assert said == run["said"]["received_bytes_per_step"] == pytest.approx(run["sent"])
        one = 2 * (world - 1) / world if RUNS[name][0] is not Gossip else min(2, world - 1)
        expected = run["exchanges"] / STEPS * one * run["exchanged_bytes"]
        assert said == pytest.approx(expected), name
    assert found[4]["local-4", "network"]["exchanges"] == 3  # after 4, 8 and 10 steps
    assert found[4]["local-late", "network"]["exchanges"] == 4 + 2
    assert found[4]["gossip", "network"]["exchanges"] == STEPS


@pytest.mark.parametrize("world", WORLDS)
def test_the_mean_of_all_workers_is_evaluated_and_their_own_given_back(found, world):
    for name, _, run in runs(found, world):
        mean = run["weights"].mean(0)
        assert difference(run["evaluated"], mean) <= 1e-15, name
        for each, held in zip(run["statistics"], run["evaluated_statistics"], strict=True):
            assert difference(each.mean(0), held) <= 1e-15
        assert run["unchanged"]
        apart = (run["weights"] - mean).square().sum(1).mean().sqrt() / mean.norm()
        assert run["report"]["details"]["consensus_distance"] == [pytest.approx(float(apart))]
        if RUNS[name][0] is not Gossip or world < 4:
            assert difference(run["weights"], mean) <= 1e-15, "the workers end with one model"
        else:
            assert apart > 1e-4


def test_gossip_leaves_the_mean_of_all_workers_where_it_is(found):
    assert found[2]["drift"] <= 1e-15
    assert 0 < found[4]["drift"] <= 1e-15


def test_model_states_are_what_a_worker_holds(found):
    for name, workload, run in runs(found, 2):
        params = sum(p.nbytes for p in workload()[0].parameters())
        assert run["states"]["parameters_bytes"] == run["states"]["gradients_bytes"] == params
        copies = {"sgd": bool(RUNS[name][2]["momentum"]), "adamw": 2}
        kept = copies[RUNS[name][2].get("optimizer", "sgd")] * params
        cls, options, *_ = RUNS[name]
        traits = cls(cls.Options(**options)).traits(2)
        padding = 64 * len(list(workload()[0].parameters()))
        assert traits.kept_copies == (
            0 if cls is not DiLoCo else 1 if "outer_momentum" in options else 2
        )
        stated = run["states"]["optimizer_bytes"]
        counts = 4 * len(list(workload()[0].parameters())) if "optimizer" in RUNS[name][2] else 0
        flat_padding = stated - (kept + counts + traits.kept_copies * params)
        assert 0 <= flat_padding <= traits.kept_copies * padding
        assert stated <= run["kept_bytes"] <= stated + 2 * padding
