"""The check of a study: what it says of odd networks is what strategies make of them, in real processes."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import odd_networks
import pytest
import torch
import torch.distributed as dist
from process_groups import forking
from torch import nn

from launching import LIMIT_S, LaunchedCell, settings
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan import check
from stratbench.extensions.plan.footprint import cache
from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.extensions.plan.pages.check_text import format_check_result
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.strategies import get_option_defaults, get_strategy_class
from stratbench.strategies.base import Strategy, Worker
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.reasons import format_skip_reasons
from stratbench.workload import users_code
from stratbench.workload.network import sharding
from stratbench.workload.network.trial import Trial
from stratbench.workload.task_trial import NO_SUM
from stratbench.workload.tasks import Classification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, CLASSES, SHAPE = 2, 10, (1, 8, 8)
#: name in the table -> strategy, options given, class names in `wrap_classes`
WAYS = {
    "ddp": ("ddp", {}, ["Block"]),
    "fsdp": ("fsdp", {}, ["Block"]),
    "by-size": ("fsdp", {}, None),
    "kept": ("fsdp", {"reshard_after_forward": "never"}, ["Block"]),
    "zero1": ("zero1", {}, ["Block"]),
    "zero1-torch": ("zero1-torch", {}, ["Block"]),
    "local": ("local-sgd", {"period": 1}, ["Block"]),
}
VARIANTS = {
    "kept": {"strategy": "fsdp", "reshard_after_forward": "never"},
    "local": {"strategy": "local-sgd", "period": 1},
}
#: network -> way -> a part of the reason why it is refused. What is not named trains as one process does.
DDP = ("ddp", "zero1-torch")
NOT_GATHERED = "FSDP gathers a group only for a call"
REFUSED: dict[str, dict[str, str]] = {
    "Plain": {},
    "Unused": dict.fromkeys(DDP, "spare.weight, spare.bias got no gradient in a step"),
    "UnusedBlock": dict.fromkeys(DDP, "extra.inner.weight, extra.inner.bias, extra.outer.weight"),
    "Tied": {},
    "Counts": {},
    "Replaces": {},
    "WritesLate": dict.fromkeys(WAYS, "its backward of a batch [2, 1, 8, 8] raised RuntimeError"),
    "Parts": dict.fromkeys(("fsdp", "kept"), NOT_GATHERED),  # by size, the parts are groups
    "ReadsLate": dict.fromkeys(("fsdp", "by-size"), "forward reads blocks.0.outer.weight outside"),
    "ReadsHead": {},  # its code says so, and by size the head is left to the root
    "Branches": {},
    "Scalar": dict.fromkeys(("fsdp", "by-size", "kept"), "along a dimension, which scale does"),
    "Transposed": dict.fromkeys(
        ("fsdp", "by-size", "kept"), "and these are not contiguous: map; call"
    ),
    "Complex": dict.fromkeys(("fsdp", "kept"), "several dtypes (complex64, float32)")
    | {"zero1-torch": "takes no complex parameters (turn)", "local": "turn is complex"},
    "Views": {"fsdp": "gives a view, which forward then changes in place"},
    "Empty": dict.fromkeys(("fsdp", "by-size", "kept"), "cannot divide nothing, which has no"),
    "Normed": {},
    "ReadsConstants": {},
    "Masked": {},
    "RaisesOnFakes": {},
    "Sparse": dict.fromkeys(
        ("ddp", "fsdp", "by-size", "kept", "zero1", "zero1-torch"),
        "the gradient of table.weight is sparse",
    ),
}


# --- what strategies really do --------------------------------------------------------------------


def train(name: str, way: str | None, rank: int, world: int) -> tuple[str | None, float]:
    """Why the strategy of `way` (None: `single`) fails to train a network, and the last loss of rank 0."""
    base, options, wrap_classes = WAYS[way] if way else ("single", {}, None)
    torch.manual_seed(0)
    model = getattr(odd_networks, name)(CLASSES)
    groups = (
        sharding.group_modules_by_class(model, wrap_classes, name)
        if wrap_classes
        else sharding.group_modules_by_size(model)
    )
    s = settings(base, options=get_option_defaults(base) | options, gpus=world)
    cls = get_strategy_class(base)
    strategy = cls(cls.Options(**s.options))
    x = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(1))
    y = torch.arange(8) % CLASSES
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    try:
        strategy.setup(
            model, Worker(s, rank, world, world, torch.device("cpu"), RunFolder(Path()), groups)
        )
        for _ in range(STEPS):
            strategy.step(x[part], y[part])
        with strategy.open_evaluation_model() as module, torch.no_grad():
            return None, float(Classification().loss(module(x), y))
    except Exception as e:
        return users_code.format_user_error(e), float("nan")


def groups_agree(rank: int, sign: int) -> str | None:
    """What FSDP says after two steps with `Orders`, the second on data of `sign`; None: nothing."""
    torch.manual_seed(0)
    model = odd_networks.Orders(CLASSES)
    groups = sharding.group_modules_by_class(model, ["Block"], "Orders")
    s = settings(
        "fsdp", options=get_option_defaults("fsdp"), own_model={"call": "x"}, model="orders"
    )
    strategy = get_strategy_class("fsdp")(get_strategy_class("fsdp").Options(**s.options))
    strategy.setup(model, Worker(s, rank, 2, 2, torch.device("cpu"), RunFolder(Path()), groups))
    x = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    for factor in (1, sign):
        strategy.step(x * factor, torch.arange(4) % CLASSES)
    try:
        strategy.check_equal_collectives()
    except users_code.Refused as e:
        return str(e)
    return None


def work(rank: int, folder: str) -> None:
    """One of two workers, which try all networks in all ways; rank 0 writes what came of it."""
    torch.set_num_threads(1)
    # One group for all: what fails, fails on both workers at the same call.
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    found = {f"{name} {way}": train(name, way, rank, 2) for name in REFUSED for way in WAYS}
    found["agreement"] = [groups_agree(rank, sign) for sign in (1, 1 - 2 * rank)]
    if rank == 0:
        found |= {f"{name} alone": train(name, None, 0, 1) for name in REFUSED}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # as a worker does: taking a group apart whose other end has gone may hang


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | None, float]]:
    """`network way` -> why it failed, and the loss on all samples at the end."""
    folder = tmp_path_factory.mktemp("outcomes")
    context = forking()
    workers = [context.Process(target=work, args=(r, str(folder)), daemon=True) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT_S)
        assert worker.exitcode == 0
    return json.loads((folder / "found.json").read_text())


# --- what the check says --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check leaves to other processes is done in this one."""
    monkeypatch.setattr(cache, "make_process_pool", lambda *_: ThreadPoolExecutor(1))


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(odd_networks.__file__).parent
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(folder))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def make_model_study(names: dict[str, list[str] | None], **changes):
    """A config and its study of odd networks; `names`: each with the classes to shard by."""
    experiment = {
        "dataset": "digits", "models": list(names),
        "strategies": [*VARIANTS, "ddp", "fsdp", "zero1", "zero1-torch", "ps-sync"],
        "gpus": [2], "epochs": 1, "global_batch": 16, "lr": 0.02, "device": "cpu",
    } | changes  # fmt: skip
    raw = {
        "study": "s",
        "code": [str(Path(odd_networks.__file__).parent)],
        "models": {
            name: {"call": f"odd_networks.{name.partition('-')[0]}"}
            | ({"wrap_classes": wrap_classes} if wrap_classes else {})
            for name, wrap_classes in names.items()
        },
        "studies": {"s": {"variants": VARIANTS, "experiments": {"e": experiment}}},
    }
    return load_config(raw)


def found_of(name: str, wrap_classes: list[str] | None = None, **changes) -> dict[str, str | None]:
    """What the check says of a network: strategy -> why it is refused."""
    config, study = make_model_study({name: wrap_classes}, **changes)
    subjects = [make_cell_to_plan(config, study, cell) for cell in study.cells]
    with tempfile.TemporaryDirectory() as folder:
        networks, made = check.dry_run_requests([s.request for s in subjects], Path(folder))
    (network,) = networks.values()
    return {s.cell.strategy: network.fault or made[s.request].refusal_reason for s in subjects}


@pytest.mark.parametrize("name", REFUSED)
def test_the_check_says_what_strategies_really_do(name, outcomes):
    said = found_of(name, ["Block"])
    said["by-size"] = found_of(name, None, strategies=["fsdp"])["fsdp"]
    alone_fails, alone = outcomes[f"{name} alone"]
    for way in WAYS:
        reason, (failed, loss) = REFUSED[name].get(way), outcomes[f"{name} {way}"]
        really = failed is None and loss == pytest.approx(alone, rel=1e-4)
        assert really == (reason is None), (way, failed, loss, alone)
        assert (said[way] is None) == really, (way, said[way], failed)
        if reason is not None:
            assert reason in said[way]
            assert said[way].startswith(f"model {name!r} (odd_networks.{name}): ")
    if alone_fails is None:
        refused_by_servers = _flat_fails(getattr(odd_networks, name)(CLASSES))
        assert (said["ps-sync"] is None) == (not refused_by_servers)


def test_a_network_in_a_format_of_its_own_is_told_what_it_is_trained_in():
    config, study = make_model_study({"Halved": None, "HalvedInput": None}, strategies=["ddp"])
    requests = [make_cell_to_plan(config, study, cell).request for cell in study.cells]
    halved = check.check_neural_network(requests[0])
    told = "its code creates parameters in bfloat16, but all strategies train them in float32 (`precision`)"
    assert halved.fault is None
    assert told in halved.remarks
    with pytest.raises(users_code.ModelError, match="BFloat16") as raised:
        check._run_model_trial(requests[1], on_fake_tensors=False)
    assert str(raised.value).endswith(f"; {told}: cast a layer's input to the dtype of its weight")


def _flat_fails(model: nn.Module) -> bool:
    """Whether a worker of a server can put the model's tensors in flat ones."""
    try:
        FlatSpace(model, shared=False)
    except ValueError:
        return True
    return False


def test_what_is_skipped_by_chance_is_refused_where_workers_would_wait_for_one_another():
    """In reality FSDP hangs, and DDP ends with an error (tried once; a hang is no test)."""
    said = found_of("Dice", ["Block"])
    assert said["ps-sync"] is None
    for way in ("ddp", "fsdp", "kept", "zero1-torch"):
        assert "not every forward calls blocks.0, blocks.1" in said[way]


def test_what_chooses_its_groups_by_its_data_is_refused_where_they_are_gathered():
    """In reality it trains something else, or hangs. DDP refuses what got no gradient."""
    said = found_of("Chooses", ["Block"])
    assert said["ps-sync"] is None
    assert said["zero1"] is None
    for way in ("ddp", "fsdp", "kept"):
        assert "not every batch uses blocks.0, blocks.1: forward chooses by values" in said[way]
    assert found_of("Chooses", ["Block"], strategies=["fsdp"], gpus=[1])["fsdp"] is None


def test_numbers_of_chosen_samples_are_values_that_are_read():
    """In reality gloo ends the workers, whose groups differ in size; NCCL would wait."""
    said = found_of("Routed", ["Block"])
    assert said["ps-sync"] is said["zero1"] is None
    for way in ("ddp", "fsdp", "kept"):
        assert "not every batch uses blocks.0, blocks.1: forward chooses by values" in said[way]


def test_what_is_too_large_to_be_tried_with_real_numbers_is_not_checked_and_no_fault(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(check, "MAX_REAL_PARAMETERS", 100)
    config, study = make_model_study(
        {"Branches": None, "Unused": None}, strategies=["ddp", "zero1"]
    )
    checked = check.check_study(config | {"results": str(tmp_path)}, study)
    text = format_check_result(checked)
    assert (
        "   not checked: model 'Branches' (odd_networks.Branches): its forward of a batch" in text
    )
    assert "cannot be trained" not in text
    assert {(c.model, c.strategy) for c in checked.refusal_reasons_by_cell} == {("Unused", "ddp")}
    assert "2 cells could not be checked before the training" in text


def test_an_error_of_fakes_alone_leaves_a_small_network_without_a_prediction_only(tmp_path):
    config, study = make_model_study({"RaisesOnFakes": None}, strategies=["ddp"])
    checked = check.check_study(config | {"results": str(tmp_path)}, study)
    (found,) = checked.dry_runs_by_request.values()
    assert (found.refusal_reason, found.footprint, found.unchecked_reason) == (None, None, None)
    assert "expected another device" in found.unpredicted_reason
    assert "ddp: works with 2 workers" in format_check_result(checked)


def test_workers_that_gather_in_another_order_do_not_go_on_unnoticed(outcomes):
    """Their collectives are of equal size, so that nothing fails."""
    alike, different = outcomes["agreement"]
    assert alike is None
    assert "in step 2 the workers called different shard groups, or in another order" in different


def test_what_a_step_may_leave_without_a_gradient_is_told(tmp_path, monkeypatch):
    config, study = make_model_study(
        {"Unused": ["Block"]}, strategies=["local-sgd", "ddp", "fsdp", "ps-sync"]
    )
    text = format_check_result(check.check_study(config | {"results": str(tmp_path)}, study))
    assert (
        "without a gradient in some steps, spare.weight, spare.bias: left as it is (local-sgd, fsdp); "
        "updated by zeros, so that momentum and decay go on (ps-sync)" in text
    ), text


def test_the_text_names_each_fault_and_each_remark(tmp_path, monkeypatch):
    names = {"Unused": ["Block"], "Tied": ["Block"], "Counts": None, "Branches": None}
    config, study = make_model_study(names, strategies=["ddp", "ps-sync"], gpus=[1, 2])
    checked = check.check_study(config | {"results": str(tmp_path)}, study)
    text = format_check_result(checked)
    assert "would stop before its first cell" not in text
    for line in (
        "Unused on digits\n   970 parameters; takes images [batch, 1, 8, 8], gives scores for 10 classes",
        "   shard groups, instances of Block: blocks.0 144, blocks.1 144; in none: 682",
        "   ddp: unsupported with 1, 2 workers: spare.weight, spare.bias got no gradient in a step, and DDP",
        "   ps-sync: works with 1, 2 workers",
        "tied: blocks.0.outer.weight = again.weight is one parameter, and stays one",
        "buffers that forward writes: rank 0 sends its buffers to all workers before each forward, and ",
        "forward writes the buffers calls, mean",
        "2 of 16 cells would end as unsupported:\n  Unused with ddp on 1, 2 workers (2 cells of e): "
        "spare.weight, ",
        "groups of about 1/12 of the parameters: stem 520, blocks.0.inner to blocks.0.outer 144, ",
    ):
        assert line in text, text


def test_the_list_of_refused_cells_has_a_line_for_each_reason():
    """Also where a plan lists them, and where a record says it of a cell that was tried."""
    said = "returned a dict for a batch; return one tensor"
    cannot = "got no gradient in a step"
    cells = [
        Cell("s", experiment, strategy, model, "digits", gpus, 0)
        for experiment in ("x", "y")
        for model in ("a", "b")
        for strategy in ("ddp", "zero1-torch")
        for gpus in (1, 2)
    ]
    whys = [
        said if c.model == "a" else f"model 'b' (m.B): {c.strategy} cannot train it: {cannot}"
        for c in cells
    ]
    assert format_skip_reasons(zip(cells, whys, strict=True)) == [
        f"a with ddp, zero1-torch on 1, 2 workers (8 cells of x, y): {said}",
        f"b with ddp, zero1-torch on 1, 2 workers (8 cells of x, y): {cannot}",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"optimizer": "adamw"}, "which AdamW does not take; build the layer with sparse=False"),
        ({"weight_decay": 0.1}, "which weight_decay cannot be added to; build the layer with"),
        (
            {"max_grad_norm": 1.0},
            "which max_grad_norm cannot measure; build the layer with sparse=False",
        ),
    ],
)
def test_who_trains_a_sparse_gradient_refuses_what_pytorch_does_not_take(changes, reason):
    named = {"gossip": {"strategy": "gossip"}, "local": VARIANTS["local"]}
    for gpus, strategies in (([1], ["single"]), ([2], list(named))):
        said = found_of("Sparse", None, gpus=gpus, strategies=strategies, **changes)
        for strategy in strategies:
            if reason is None:
                assert said[strategy] is None, said
            else:
                assert f"the gradient of table.weight is sparse, {reason}" in said[strategy], said


def test_fused_kernels_are_left_out_on_a_gpu_where_a_gradient_is_sparse():
    """PyTorch's fused SGD takes none. What stands for the device is all that is asked of it."""
    for name in ("Plain", "Sparse"):
        strategy = get_strategy_class("single")(get_strategy_class("single").Options())
        strategy.worker = SimpleNamespace(settings=settings("single"))
        strategy.model = getattr(odd_networks, name)(CLASSES)
        strategy.local = [SimpleNamespace(device=torch.device("cuda"))]
        assert strategy.get_optimizer_class()[1]["fused"] == (name == "Plain")


TASKS = """
from torch.nn import functional as F

class Good:
    score_name, unit, better, counts, tolerance = "top-1", "share", "higher", "images", 1.0
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)
    def score(self, outputs, targets):
        return (outputs.argmax(-1) == targets).double()

class Nameless(Good):
    score_name = None

class OneScore(Good):
    def score(self, outputs, targets):
        return super().score(outputs, targets).mean()

class Losses(Good):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

class Ignores(Good):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, ignore_index=6)

class Weighs(Good):
    def loss(self, outputs, targets):
        total = F.cross_entropy(outputs, targets, ignore_index=6, reduction="sum")
        return total, (targets != 6).sum()
"""
#: A task that none can train by, and what the check and a cell say of it.
BAD_TASKS = {
    "Nameless": "its attribute score_name is None; it must be a short text, the score's name",
    "OneScore": "its method score, called with outputs [2, 10] in float32 and targets [2], returned a tensor "
    "[]; return a score per sample, [2] or [2, ...]",
    "Losses": "its method loss, called with outputs [2, 10] in float32 and targets [2], returned a tensor "
    "[2]; return the mean as a scalar with a gradient, or (sum, weight)",
}


def check_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch, **blocks: dict) -> check.StudyCheck:
    """The check of a study with an experiment for each of `blocks`, all of the network Plain."""
    name = f"my_tasks_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(TASKS)
    code = [str(Path(odd_networks.__file__).parent), str(folder)]
    monkeypatch.setenv(users_code.CODE_VARIABLE, os.pathsep.join(code))
    monkeypatch.setattr(sys, "path", [*code, *sys.path])
    base = {
        "dataset": "digits", "models": ["Plain"], "strategies": ["ddp"], "gpus": [2], "epochs": 1,
        "global_batch": 16, "lr": 0.02, "device": "cpu",
    }  # fmt: skip
    for block in blocks.values():
        if "task" in block:
            block["task"] = f"{name}:{block['task']}"
    config, study = load_config(
        {
            "study": "s",
            "results": str(folder / "results"),
            "code": code,
            "models": {"Plain": {"call": "odd_networks.Plain"}},
            "studies": {"s": {"experiments": {x: base | block for x, block in blocks.items()}}},
        }
    )
    return check.check_study(config, study)


@pytest.mark.parametrize(
    ("bad", "first"), [("Nameless", True), ("OneScore", False), ("Losses", True)]
)
def test_a_bad_task_refuses_the_cells_of_its_experiment_alone(tmp_path, monkeypatch, bad, first):
    blocks = {"x": {}, "y": {"task": bad}, "z": {"task": "Good"}}
    blocks = dict(sorted(blocks.items(), reverse=first))
    checked = check_tasks(tmp_path, monkeypatch, **blocks)
    [(cell, reason)] = checked.refusal_reasons_by_cell.items()
    assert cell.experiment == "y"
    assert reason.startswith("task 'my_tasks_")
    assert reason.endswith(BAD_TASKS[bad])
    text = format_check_result(checked)
    assert text.count("ddp: works with 2 workers\n") == 2
    end = "1 of 3 cells cannot be trained by any strategy, and a run would stop before its first cell:\n"
    assert f"\n{end}  Plain with ddp on 2 workers (1 cell of y): task " in text
    assert "unsupported" not in text
    assert f"Plain on digits, task '{blocks['y']['task']}'\n   cannot be trained: task '" in text


def test_a_loss_that_is_no_mean_over_its_parts_is_told_and_trains(tmp_path, monkeypatch):
    each = {"strategies": ["ddp", "ps-sync"]}
    blocks = {"x": each | {"task": "Ignores"}, "y": each | {"task": "Weighs"}}
    checked = check_tasks(tmp_path, monkeypatch, **blocks)
    assert not checked.refusal_reasons_by_cell
    ignores, weighs = format_check_result(checked).split("'\n   ")[1:]
    assert f"   {NO_SUM}\n" in ignores
    assert NO_SUM not in weighs


@pytest.mark.parametrize("bad", ["OneScore", "Losses"])
def test_a_cell_and_the_check_say_the_same_of_a_task(start_cell, warm, tmp_path, bad):
    name = f"my_tasks_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(TASKS)
    call = f"{name}:{bad}"
    s = settings(own_task={"call": call} | users_code.compute_code_fingerprint(call, [tmp_path]))
    launched = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
    assert launched.finish()[0] == 1
    failure = json.loads((launched.logs / "failure.json").read_text())
    # The tests' data have three classes.
    assert BAD_TASKS[bad].replace("[2, 10]", "[2, 3]") in failure["reason"]


@pytest.mark.parametrize("first", [True, False])
def test_what_one_experiment_asks_of_a_network_refuses_no_other(tmp_path, monkeypatch, first):
    """Activation checkpointing of a network without blocks; the lines name the experiment."""
    blocks = {"x": {}, "y": {"activation_checkpointing": True}}
    checked = check_tasks(tmp_path, monkeypatch, **dict(sorted(blocks.items(), reverse=first)))
    [(cell, reason)] = checked.refusal_reasons_by_cell.items()
    assert (cell.experiment, "activation_checkpointing" in reason) == ("y", True), reason
    text = format_check_result(checked)
    assert "   ddp: works with 2 workers in x\n   ddp: unsupported with 2 workers in y: " in text


def test_a_batch_of_one_sample_that_is_normalised_over_is_refused(tmp_path, monkeypatch):
    config, study = make_model_study(
        {"Normalises": None}, strategies=["ddp"], gpus=[1, 2], global_batch=2
    )
    checked = check.check_study(config | {"results": str(tmp_path)}, study)
    assert list(checked.refusal_reasons_by_cell.values()) == [
        "model 'Normalises' (odd_networks.Normalises): BatchNorm normalises over a worker's "
        "batch, which has only one sample; use a larger batch, or fewer workers"
    ]
    assert next(iter(checked.refusal_reasons_by_cell)).gpus == 2


def test_what_had_no_fault_is_not_checked_again_and_a_fault_is(tmp_path, capsys, monkeypatch):
    config, study = make_model_study({"Plain": None, "Unused": None}, strategies=["ddp"])
    config |= {"results": str(tmp_path)}
    for networks, cells in ((2, ["Plain", "Unused"]), (0, ["Unused"])):
        checked = check.check_study(config, study)
        told = capsys.readouterr().out
        assert (f"models to check: {networks}\n" in told) == (networks > 0)
        assert [n for n in ("Plain", "Unused") if f"  {n} with ddp: " in told] == cells
        assert [cell.model for cell in checked.refusal_reasons_by_cell] == ["Unused"]
    assert (
        checked.checks_by_network[
            check.Network.from_request(checked.cells_to_plan[0].request)
        ].num_parameters
        == 898
    )


def test_it_is_told_how_long_the_rest_will_take(tmp_path, capsys):
    config, study = make_model_study({"Plain": None}, strategies=["ddp", "zero1"])
    check.check_study(config | {"results": str(tmp_path)}, study)
    first, last = (line for line in capsys.readouterr().out.splitlines() if " of 2" in line)
    assert re.fullmatch(r"  Plain with (ddp|zero1): 1 of 2, about \d+ (s|min) left", first), first
    assert last.endswith("2 of 2")


def test_a_footprint_is_made_where_the_check_has_been_without_a_second_look(tmp_path, monkeypatch):
    """One walk through a network says whether a strategy takes it, and what a step of it takes."""
    config, study = make_model_study({"Plain": None}, strategies=["fsdp"])
    config |= {"results": str(tmp_path)}
    monkeypatch.setattr(
        check,
        "_find_strategy_refusal_reason",
        lambda *_: pytest.fail("it was walked through twice"),
    )
    checked = check.check_study(config, study)
    assert not checked.refusal_reasons_by_cell
    assert checked.dry_runs_by_request[checked.cells_to_plan[0].request].footprint.collectives


def test_every_strategy_that_the_settings_refuse_is_told_at_once():
    with pytest.raises(ConfigError) as raised:
        make_model_study(
            {"Plain": None}, strategies=["ps-dana", "ddp", "ps-dcasgd"], optimizer="adamw"
        )
    lines = str(raised.value).splitlines()
    assert [line.partition("; remove ")[2].split()[0] for line in lines] == ["ps-dana", "ps-dcasgd"]
    assert all(line.startswith("config: studies.s.experiments.e.optimizer = ") for line in lines)


# --- what jobs say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "strategy", "batch", "sentence"),
    [
        ("Unused", "ddp", 8, "ddp cannot train it: spare.weight, spare.bias got no gradient"),
        (
            "Dice",
            "ddp",
            8,
            "not every forward calls blocks.0, blocks.1: each worker draws its own random numbers",
        ),
        (
            "Dice",
            "fsdp",
            8,
            "not every forward calls blocks.0, blocks.1: each worker draws its own random numbers",
        ),
        (
            "Chooses",
            "fsdp",
            8,
            "not every batch uses blocks.0, blocks.1: forward chooses by values",
        ),
        (
            "Orders",
            "fsdp",
            8,
            "the workers called different shard groups, or in another order",
        ),
        ("Parts", "fsdp", 8, "fsdp cannot train it: forward reads blocks.0.inner.weight"),
        ("Normalises", "ddp", 1, "batch, which has only one sample; use a larger batch"),
        ("Unused", "ps-sync", 8, None),
        ("Sparse", "ps-sync", 8, None),
        ("Dice", "ps-sync", 8, None),
    ],
)
def test_a_job_ends_with_the_checks_sentence(
    start_cell: Callable[..., LaunchedCell],
    warm,
    tiny_data,
    code,
    name,
    strategy,
    batch,
    sentence,
):
    call = f"odd_networks.{name}"
    spec = {
        "call": call,
        "kwargs": {},
        "wrap_classes": ["Block"],
    } | users_code.compute_code_fingerprint(call, [code])
    s = settings(
        strategy, model="odd", own_model=spec, per_worker_batch=batch, global_batch=2 * batch
    )
    launched = start_cell(s, data_dir=tiny_data, env=warm | {users_code.CODE_VARIABLE: str(code)})
    exit_code, output = launched.finish()
    assert exit_code == 0, output
    made = launched.read_record()
    if sentence is None:
        assert made["status"] == "ok"
        assert made["strategy"]["traits"]["equals_ddp"] == (name != "Dice")
    else:
        assert made["status"] == "unsupported"
        assert sentence in made["reason"]
        assert "Traceback" not in made["reason"]


# --- FSDP2's own mixed precision ------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def by_policy(
    model: nn.Module, trial: Trial | None = None, world: int = 1, options=None, **changes
) -> tuple[Strategy, Worker]:
    """FSDP with its own mixed precision and the shard groups of a user's network, before `setup`."""
    options = get_option_defaults("fsdp") | {"mixed_precision": "policy"} | (options or {})
    changes = {"precision": "bf16", "gpus": 1, "global_batch": 8, "per_worker_batch": 8} | changes
    s = settings("fsdp", options=options, own_model={"call": "x"}, **changes)
    strategy = get_strategy_class("fsdp")(get_strategy_class("fsdp").Options(**options))
    groups = sharding.group_modules_by_size(model)
    place = torch.device("cpu"), RunFolder(Path()), groups
    return strategy, Worker(s, 0, world, world, *place, trial=trial)


def test_norms_that_lie_in_a_shard_group_stay_in_float32(alone):
    """In a group with what computes in 16 bits their statistics would be rounded."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*wide, nn.Linear(8 * 36, 1000), nn.ReLU(), nn.Linear(1000, CLASSES))
    strategy, worker = by_policy(model)
    assert any(nn.BatchNorm2d in map(type, modules) for _, modules in worker.wrap_groups)
    seen = []
    model[1].register_forward_pre_hook(lambda norm, _: seen.append(norm.weight.dtype))
    strategy.setup(model, worker)
    assert strategy.step(torch.randn(8, *SHAPE), torch.arange(8)).isfinite()
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("options", "world", "remedy"),
    [
        ({}, 1, None),
        ({"gradient_sync": "last-part"}, 1, "set gradient_sync to each-part, mixed_precision"),
        ({"shard_group_size": 2}, 4, "set gradient_sync to last-part, shard_group_size to all"),
        ({"shard_group_size": 2}, 2, None),
    ],
)
@pytest.mark.parametrize("parts", [1, 4])
def test_what_some_parts_skip_is_refused_where_fsdp_cannot_add_it_up(parts, options, world, remedy):
    """FSDP2 would add a gradient in 16 bits to one in 32, or shards of different parameters."""
    trial = Trial(parameters_without_gradient=("blocks.0",), forward_reads_values=True)
    strategy, worker = by_policy(
        odd_networks.Plain(CLASSES), trial, world, options, gradient_accumulation_steps=parts
    )
    said = list(strategy.iter_model_refusals(odd_networks.Plain(CLASSES), worker))
    assert len(said) == (parts > 1 and remedy is not None)
    assert all(remedy in reason for reason in said)
