"""Each network of the zoo under each strategy: the plain loop's losses to 1e-12, or why not in a sentence.

Two real workers go the way of a cell: set-up with the trial, warm-up, timed epochs, evaluation. The networks
are in zoo.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zoo
from process_groups import forking
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from launching import LIMIT_S, settings
from stratbench.cell.extensions import import_attribute
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.plan import check
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.remarks import iter_model_remarks
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.strategy import make_server_configs
from stratbench.extensions.servers.wire.handshake import make_secret, write_secret
from stratbench.strategies import acceptance, get_option_defaults, get_strategy_class, make_strategy
from stratbench.strategies.base import Strategy
from stratbench.strategies.sharding.zero import ZeRO1
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop, worker
from stratbench.workload import generators, users_code
from stratbench.workload.data.device_data import Images
from stratbench.workload.network import models, trial
from stratbench.workload.network.changes import Attributes, Changes

#: Of a network trained in a way, perhaps with a mistake.
Cell = tuple[str, str, str]

CLASSES, SAMPLES, BATCH, EPOCHS, SEED = 5, 16, 8, 2, 7
HYPER = {"lr": 0.05, "momentum": 0.9}
TOLERANCE = 1e-12
#: name -> strategy, options given, workers
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "single": ("single", {}, 1),
    "fsdp-alone": ("fsdp", {}, 1),
    "ps-alone": ("ps-sync", {}, 1),
    "ddp": ("ddp", {}, 2),
    "fsdp": ("fsdp", {}, 2),
    "fsdp-kept": ("fsdp", {"reshard_after_forward": "never"}, 2),
    "zero1": ("zero1", {}, 2),
    "zero1-torch": ("zero1-torch", {}, 2),
    "local": ("local-sgd", {"period": 1}, 2),
    "ps-sync": ("ps-sync", {}, 2),
}
#: Ways of strategies whose code other ways run, too: each network goes two of these, a third apart.
FURTHER = ("single", "zero1-torch", "local", "fsdp-alone", "fsdp-kept", "ps-alone")


# --- what the processes run -----------------------------------------------------------------------


def samples(count: int, number: int) -> tuple[Tensor, Tensor]:
    """Images (brighter the higher the label) and labels."""
    generator = torch.Generator().manual_seed(number)
    y = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, 4, 4, generator=generator)
    return noise + (y.float() - 2).view(-1, 1, 1, 1) / 2, y


def data_of() -> Images:
    meta = {
        "name": "made", "shape": [1, 4, 4], "classes": CLASSES, "mean": [0.0], "std": [1.0],
        "crop_padding": 0, "flip": False, "floats": True,
    }  # fmt: skip
    train, test = samples(SAMPLES, 1), samples(6, 2)
    arrays = {"train_inputs": train[0], "train_targets": train[1], "test_inputs": test[0]}
    arrays["test_targets"] = test[1]
    return Images(meta, arrays, (1, 4, 4), torch.float64, torch.contiguous_format)


def settings_of(name: str, way: str) -> Settings:
    strategy, options, workers = WAYS[way]
    return settings(
        strategy, options=get_option_defaults(strategy) | options, model=name, dataset="made",
        own_model={"call": f"zoo.{name}", "kwargs": {}, "wrap_classes": None}, gpus=workers, seed=SEED,
        epochs=EPOCHS, global_batch=BATCH, per_worker_batch=BATCH // workers, precision="fp64",
        **HYPER,
    )  # fmt: skip


def a_bucket_each(parameters: list[Tensor], *_: Any) -> tuple[list[list[int]], list[int]]:
    """In place of buckets by size: one for each parameter."""
    return [[i] for i in range(len(parameters))], []


def train(name: str, way: str, rank: int, folder: Path) -> dict[str, Any]:
    """What a cell's worker makes of a network: why it refuses it, or its losses."""
    s, data = settings_of(name, way), data_of()
    folder.mkdir(parents=True, exist_ok=True)
    run_folder, strategy = RunFolder(folder), make_strategy(s.strategy, s.options)
    served = contextlib.nullcontext()
    if strategy.kind == "server" and rank == 0:
        served = serving(s, run_folder)
    elif strategy.kind == "server":
        while not run_folder.job_secret_path.exists():
            time.sleep(0.001)
    device, found = torch.device("cpu"), {}
    buckets = mock.patch.object(dist, "_compute_bucket_assignment_by_size", a_bucket_each)
    with served, buckets if s.strategy == "zero1" else contextlib.nullcontext():
        try:
            ready = worker.set_up_model(
                s, strategy, data, device, rank,
                rank=rank, world_size=s.gpus, local_world_size=s.gpus, folder=run_folder,
                mesh=strategy.mesh(s.gpus),
            )  # fmt: skip
        except users_code.ModelError as e:
            return {"unsupported": str(e)}
        except Exception as e:  # whatever a network makes of a strategy
            return {"failed": users_code.format_user_error(e)}
        log = PhaseLog(folder / f"phases{rank}", rank, time.monotonic())
        taking = import_attribute(strategy.loop) if strategy.loop else loop.train
        try:
            result = taking(
                strategy, data, ready.worker, Phases(device, log), log, MemoryMeter(device),
                loop.EpochProgress(None),
            )  # fmt: skip
            found["zeros"] = acceptance.updates_parameters_without_gradient(
                strategy, ready.built.trial, s
            )
            found["dropout"] = ready.built.facts["dropout"]
            found["losses"] = [
                (e["train_loss"], e["test_loss"]) for e in result.progress.epoch_results
            ]
            steps = [result.losses[e].values() for e in sorted(result.losses)]
            found["own"] = [tuple(map(sum, zip(*each, strict=True))) for each in steps]
        except users_code.ModelError as e:
            return {"unsupported": str(e)}
        except Exception as e:  # whatever a network makes of a strategy
            return {"failed": users_code.format_user_error(e)}
        finally:
            if strategy.kind != "server" or found:
                strategy.close()
    return found


@contextlib.contextmanager
def serving(s: Settings, folder: RunFolder) -> Iterator[None]:
    """A server on a thread of this process, until the block ends."""
    secret = make_secret()
    write_secret(folder.job_secret_path, secret)
    (config,) = make_server_configs(s, SAMPLES, folder, None)
    pool = ThreadPoolExecutor(1)
    future = pool.submit(run_server, config, secret)
    pool.shutdown(wait=False)
    yield
    if not future.done():
        with contextlib.suppress(Exception):
            future.result(1)


def ways_of(name: str) -> set[str]:
    """The ways that a network goes: all that refuse it, those of all networks, and two of the others."""
    number = list(zoo.NETWORKS).index(name)
    return {*REFUSED.get(name, ()), *(set(WAYS) - set(FURTHER)), *FURTHER[number % 3 :: 3]}


def member(cells: list[Cell], rank: int, folder: str) -> None:
    """One of two workers, which train networks in some ways."""
    gc.freeze()  # each cell looks for garbage, and what is imported is none
    torch.set_num_threads(1)
    os.environ[users_code.CODE_VARIABLE] = str(Path(__file__).parent)
    found: dict[str, Any] = {}
    for world in (2, 1):
        if rank >= world:
            break
        store = dist.FileStore(f"{folder}/store{world}", world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        for name, way, mutant in cells:
            if WAYS[way][2] == world:
                own = Path(folder) / f"{name}-{way}-{mutant}"
                with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
                    found[f"{name} {way} {mutant}"] = train(name, way, rank, own)
        dist.barrier()
        dist.destroy_process_group()
    Path(folder, f"found{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def trained(cells: list[Cell], folder: Path) -> dict[str, dict[str, Any]]:
    """`network way mutant` -> what came of it, with the losses of all workers."""
    context = forking()
    members = [
        context.Process(target=member, args=(cells, rank, str(folder)), daemon=True)
        for rank in range(2)
    ]
    for process in members:
        process.start()
    for process in members:
        process.join(LIMIT_S)
    assert [process.exitcode for process in members] == [0, 0]
    first, second = (json.loads((folder / f"found{r}.json").read_text()) for r in range(2))
    for key, found in first.items():
        both = [f for f in (found, second.get(key)) if f]
        assert len({f.get("unsupported") for f in both}) == 1, (key, both)
        if found.get("own"):  # the mean over all batches that workers of a server took
            epochs = zip(*(f["own"] for f in both), strict=True)
            means = [sum(s for s, _ in e) / sum(n for _, n in e) for e in epochs]
            tested = next(f["losses"] for f in both if f["losses"])
            found["losses"] = [(m, t) for m, (_, t) in zip(means, tested, strict=True)]
    return first


def plain(name: str, way: str) -> list[tuple[float, float]]:
    """What the plain loop makes of a network, on as many workers."""
    strategy, _, workers = WAYS[way]
    return trained_plainly(name, workers, "mean" in get_strategy_class(strategy).evaluated_on)


@cache
def trained_plainly(name: str, workers: int, mean: bool) -> list[tuple[float, float]]:
    """The losses that several ways are held to; `mean`: evaluated with the mean of the copies' buffers."""
    data = data_of()
    epochs = (
        [
            data.make_training_batch(i)
            for i in data.draw_order_and_augmentation(SEED, epoch, False).order.split(BATCH)
        ]
        for epoch in range(EPOCHS)
    )
    make = partial(zoo.NETWORKS[name], CLASSES)
    return zoo.train_plainly(make, SEED, workers, epochs, data.make_test_batch(0, 6), HYPER, mean)


# --- mutants --------------------------------------------------------------------------------------


def new_parameters() -> contextlib.AbstractContextManager:
    """Parameters and buffers are replaced by others."""

    def place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        models.replace_model_tensors(model, lambda t: t.detach().to(dtype))

    return mock.patch.object(models, "move_model_tensors", place)


def torch_alone() -> contextlib.AbstractContextManager:
    """Neither Python's generator nor numpy's is seeded."""
    return mock.patch.multiple(generators, random=mock.MagicMock(), np=mock.MagicMock())


def early_sends() -> contextlib.AbstractContextManager:
    """`zero1` takes the first part of a gradient for the whole."""
    return mock.patch.object(ZeRO1, "adds_to_gradients_repeatedly", False)


def nothing_frozen() -> contextlib.AbstractContextManager:
    """Frozen parameters that forward changes are not brought back."""
    return mock.patch.object(Strategy, "list_changed_frozen_parameters", return_value=[])


def attributes_left() -> contextlib.AbstractContextManager:
    """Plain attributes are not brought back after the warm-up."""
    return mock.patch.object(Attributes, "restore_user_attributes")


def trial_left() -> contextlib.AbstractContextManager:
    """The trial leaves what its forwards have changed."""
    return mock.patch.object(Changes, "restore_model")


#: name -> what makes the mistake, until the block ends
MUTANTS = {
    made.__name__: made
    for made in (
        new_parameters,
        torch_alone,
        early_sends,
        nothing_frozen,
        attributes_left,
        trial_left,
    )
}
#: By which networks each mistake is seen.
SEEN_BY: list[Cell] = [
    ("Hooked", "single", "new_parameters"),
    ("InList", "zero1", "new_parameters"),
    ("InList", "ps-sync", "new_parameters"),
    ("PythonNoise", "single", "torch_alone"),
    ("FromPython", "single", "torch_alone"),
    ("Again", "zero1", "early_sends"),
    ("Teacher", "ddp", "nothing_frozen"),
    ("CountsInNumber", "single", "attributes_left"),
    ("OneBuffer", "ddp", "trial_left"),
]


# --- what is expected ------------------------------------------------------------------------------

DDP, FSDP, PS = ("ddp", "zero1-torch"), ("fsdp", "fsdp-kept", "fsdp-alone"), ("ps-sync", "ps-alone")
HOOK = dict.fromkeys(FSDP, "stem.weight has a gradient hook")
LOST = dict.fromkeys(FSDP, "these changes are lost when the weights are gathered or pulled")
NOT_KEPT = (
    "evaluation depends on it, but the servers keep weights and buffers of real numbers alone"
)
CHOOSES = "forward chooses by values of tensors"
ON_TWO = ("ddp", "zero1-torch", "fsdp", "fsdp-kept")
#: network -> way -> a part of the sentence that refuses it. What is not named trains as the plain loop does.
REFUSED: dict[str, dict[str, str]] = {
    "Hooked": HOOK,
    "HookedLate": HOOK,
    "InList": dict.fromkeys(FSDP, "forward reads gain from a list or dictionary instead"),
    "InDict": dict.fromkeys(
        FSDP, "forward reads stem.weight, stem.bias, head.weight, head.bias from a list"
    )
    | dict.fromkeys(DDP, "mid.weight, mid.bias got no gradient in a step"),
    "TiedByMemory": dict.fromkeys(WAYS, "assign the parameter itself"),
    "OwnClass": dict.fromkeys(FSDP, "forward uses the class or an attribute of gain"),
    "OneBuffer": dict.fromkeys(PS, "servers hand a batch to whichever worker is free"),
    "Teacher": LOST | dict.fromkeys(PS, NOT_KEPT),
    "CountsInBuffer": dict.fromkeys(PS, f"forward changes steps, and {NOT_KEPT}"),
    "CountsInNumber": dict.fromkeys(PS, f"forward changes calls, and {NOT_KEPT}"),
    "Remembers": dict.fromkeys(PS, f"forward changes seen, state, and {NOT_KEPT}"),
    "Replaces": dict.fromkeys(PS, f"forward changes factor, and {NOT_KEPT}"),
    "Changes": LOST | dict.fromkeys(PS, "these changes are lost"),
    "MaxNorm": LOST
    | dict.fromkeys(PS, "these changes are lost")
    | dict.fromkeys((*DDP, "zero1"), "depend on the batch, so the workers' replicas would diverge"),
    "Again": dict.fromkeys((*DDP, *FSDP), "checkpoint with use_reentrant=False"),
    "Complex": dict.fromkeys(PS, "several dtypes (complex64, float64)")
    | {"zero1-torch": "takes no complex parameters (turn)"}
    | {"local": "turn is complex"},
    "Routed": dict.fromkeys(ON_TWO, CHOOSES),
    "Branches": dict.fromkeys(ON_TWO, CHOOSES),
    "Unused": dict.fromkeys(DDP, "spare.weight, spare.bias got no gradient in a step"),
}
#: What draws random numbers in training.
DRAWS = {"Dropout", "PythonNoise"}
#: Of one with weights of its own on each worker, which claims no equality: what averages make of these.
LOCAL_APART = {"MaxNorm", "Routed", "Branches"}
#: What each worker of servers has by the batches that it was handed.
BY_TICKETS = {"WithBatchNorm", *DRAWS}
#: Of the quick part, one of each kind: refused, shared weights, state, buffers and random numbers.
QUICK = ["Plain", "Hooked", "Tied", "CountsInNumber", "WithBatchNorm", "PythonNoise"]
QUICK_WAYS = ["single", "ddp", "fsdp", "zero1", "ps-sync"]


def faults(name: str, way: str, found: dict[str, Any]) -> Iterator[str]:
    """What is wrong with what came of a network: neither the plain losses, nor a sentence that says why."""
    reason = REFUSED.get(name, {}).get(way)
    if reason is not None:
        if reason not in found.get("unsupported", ""):
            yield f"{name} {way}: {found}, but it should be refused: {reason}"
        return
    if "losses" not in found:
        yield f"{name} {way}: {found}"
        return
    if found["dropout"] != (name in DRAWS):
        yield f"{name} {way}: dropout is {found['dropout']}"
    if found["zeros"] or (way == "local" and name in LOCAL_APART):
        return  # the record says that it equals no other
    if way == "ps-sync" and name in BY_TICKETS:
        return
    expected = plain(name, way)
    pairs = zip(found["losses"], expected, strict=True)
    apart = max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
    if not apart <= TOLERANCE:
        yield f"{name} {way}: {found['losses']}, and plainly {expected}"


def check_all(found: dict[str, dict[str, Any]]) -> None:
    """AssertionError that names everything that is wrong."""
    assert found
    wrong = [w for key, f in found.items() for w in faults(*key.split()[:2], f)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(LIMIT_S)
def test_networks_as_people_bring_them_train_as_the_plain_loop_does(tmp_path):
    check_all(trained([(name, way, "") for name, way in product(QUICK, QUICK_WAYS)], tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_so_does_the_rest_of_the_zoo_under_every_strategy(tmp_path):
    quick = set(product(QUICK, QUICK_WAYS))
    rest = [
        (name, way, "")
        for name in zoo.NETWORKS
        for way in sorted(ways_of(name))
        if (name, way) not in quick
    ]
    check_all(trained(rest, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_the_check_says_of_each_network_what_a_run_does(name, monkeypatch):
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(Path(__file__).parent))
    requests = {
        way: Request(settings_of(name, way), (1, 4, 4), CLASSES, WAYS[way][2], eval_batch=6)
        for way in QUICK_WAYS
    }
    network = check.check_neural_network(requests.pop("single"))
    for way, request in requests.items():
        said = network.fault or check.dry_run_strategy(request, network).refusal_reason
        reason = REFUSED.get(name, {}).get(way)
        assert (said is None) == (reason is None), (way, said)
        assert reason is None or reason in said
    assert network.fault or network.has_dropout == (name in DRAWS)


class Loose(zoo.Base):
    """Holds parameters in plain lists and dictionaries: nothing registers them."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.gains, self.layers = [nn.Parameter(torch.ones(1))], {"a": [nn.Linear(2, 2)]}
        self.known = [self.mid.weight]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (zoo.Plain, ()),
        (zoo.Hooked, ("stem.weight has a gradient hook, which gets each worker's own",)),
        (zoo.CountsInNumber, ("forward changes the plain attributes calls: the warm-up",)),
        (zoo.Teacher, ("forward changes the parameters teacher.0.weight",)),
        (zoo.Normed, ()),
        (Loose, ("gains, layers contains parameters that no module has registered",)),
    ],
)
def test_what_is_worth_knowing_is_remarked(kind, said):
    model = kind(CLASSES)
    x, y = samples(2, 0)
    with generators.preserve_random_generators():
        found = trial.run_trial_steps("it", model, x, y, [2, CLASSES], (), CLASSES)
    remarks = list(iter_model_remarks(model, found))
    assert len(remarks) == len(said)
    assert all(part in remark for part, remark in zip(said, remarks, strict=True)), remarks


class Skips(zoo.Base):
    """Calls its middle where a number is small."""

    def __init__(self, classes: int, draw: Callable[[], float]) -> None:
        super().__init__(classes)
        self.draw = draw

    def change(self, h: Tensor) -> Tensor:
        return self.mid(h) if self.draw() < 0.5 else h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.stem(x.flatten(1))))


@pytest.mark.parametrize(
    ("draw", "names", "passes"),
    [(random.random, ("mid",), 8), (np.random.rand, ("mid",), 8), (float, (), 1)],
)
def test_fake_tensors_pass_again_only_where_numbers_of_python_or_numpy_are_drawn(
    draw, names, passes
):
    drawn: list[float] = []

    def drawing() -> float:
        drawn.append(draw())
        return drawn[-1]

    with generators.preserve_random_generators(), FakeTensorMode(allow_non_fake_inputs=True):
        model = Skips(CLASSES, drawing)
        with Changes(model) as changes:
            found = trial.find_randomly_called_modules(model, torch.zeros(2, 1, 4, 4), changes)
    assert found == names
    assert len(drawn) == passes


@pytest.mark.parametrize("kind", [zoo.Layers, zoo.Dropout, *zoo.DRAWING])
def test_fake_tensors_tell_who_draws_random_numbers(kind):
    """`Layers` has the same operators with nothing to drop."""
    with generators.preserve_random_generators(), FakeTensorMode(allow_non_fake_inputs=True):
        x, y = torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64)
        found = trial.run_trial_steps("it", kind(CLASSES), x, y, [2, CLASSES], (), CLASSES)
    assert found.forward_draws_random_numbers == (kind is not zoo.Layers)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_each_mistake_is_seen_and_so_is_a_start_that_no_seed_decides(tmp_path):
    other_starts = [("FromOutside", way, "") for way in ("ddp", "fsdp", "zero1", "local")]
    found = trained([*SEEN_BY, *other_starts], tmp_path)
    for name, way, mutant in SEEN_BY:
        assert list(faults(name, way, found[f"{name} {way} {mutant}"])), (name, way, mutant)
    for name, way, _ in other_starts:
        reason = found[f"{name} {way} "]["unsupported"]
        assert (
            "its workers have built it with different initial weights from the same seed" in reason
        )
