"""Tasks: their scores, a user's own and what each mistake says, cells of steps, records of version 1."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import fixture_records as fixture
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from test_analysis_decide import cell, decided, standings
from test_own_models import experiment, study_of
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from launching import settings
from stratbench.analysis.figures.figure_data import build_figure_data
from stratbench.analysis.figures.plots import draw_figure, iter_figure_names_and_worker_counts
from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import COLUMNS, read_cells, read_epochs
from stratbench.analysis.records.measures import map_measures_by_name
from stratbench.analysis.report import report
from stratbench.analysis.tables import tables
from stratbench.analysis.tables.summary import build_summary_table
from stratbench.cell import record
from stratbench.extensions.audit import audit
from stratbench.extensions.servers.ps.store import EpochLog
from stratbench.extensions.servers.ps.tickets import TicketPlan
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.workload import task_trial, tasks, users_code
from stratbench.workload.users_code import ModelError

MINIMUM = 1.5
RULE = {rule.id: rule for rule in audit.RULES}
NO_CELLS = pd.DataFrame(columns=list(COLUMNS))


def unusable(found: dict) -> list[str]:
    """What the audit finds in a record that no busy machine explains."""
    listed = audit.audit_cells(NO_CELLS, [found])
    return [f["figures"] for f in listed if f["severity"] == "unusable"]


# --- the built-in tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("parts", [[24], [7, 1, 16]])
def test_batches_add_up_to_the_score_of_the_whole_test_set(name, parts):
    """And its standard error is that of the mean over samples, of whose answers one tells of the next."""
    task, shape = tasks.TASKS[name](), [24, 5] if name.endswith("token") else [24]
    torch.manual_seed(0)
    outputs, targets = torch.randn(*shape, 6), torch.randint(0, 6, shape)
    sums = sum(
        tasks.compute_loss_and_score_sums(task, x, y)
        for x, y in zip(outputs.split(parts), targets.split(parts), strict=True)
    )
    loss, score, error, left_out = tasks.compute_test_loss_and_score(sums.tolist())
    assert left_out == 0
    flat = outputs.double().flatten(0, -2), targets.flatten()
    expected = torch.nn.functional.cross_entropy(*flat)
    assert loss == pytest.approx(float(expected), rel=1e-12)
    each = (outputs.argmax(-1) == targets).double()
    if len(shape) == 2:
        assert score == pytest.approx(loss, rel=1e-12)
        each = torch.nn.functional.cross_entropy(*flat, reduction="none").view(24, 5).mean(1)
    assert score == pytest.approx(float(each.mean()), rel=1e-12)
    assert error == pytest.approx(float(each.std(correction=0)) / math.sqrt(24), rel=1e-9)


def test_who_guesses_has_the_score_that_the_task_says():
    outputs, targets = torch.zeros(4, 3, 10), torch.randint(0, 10, (4, 3))
    assert tasks.NextToken().score(outputs, targets).mean() == pytest.approx(
        tasks.NextToken().guess(10)
    )
    assert tasks.Classification().guess(10) == 0.1


# --- a user's own ---------------------------------------------------------------------------------

OWN = """
import torch
import torch.nn.functional as F

class Top3:
    score_name, unit, better, counts, tolerance = "top-3 accuracy", "share", "higher", "images", 2.0

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)

    def score(self, outputs, targets):
        return (outputs.topk(3).indices == targets[:, None]).any(1)

class Texts(Top3):
    counts = "tokens"

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def score(self, outputs, targets):
        return (outputs.argmax(-1) == targets).double()

class LongTexts(Texts):
    def loss(self, outputs, targets):
        each = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        weights = torch.linspace(0, 1, 300).to(outputs).expand(targets.shape)
        return weights.flatten() @ each, weights.sum()

class BadTexts(Texts):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)

class Nameless(Top3):
    score_name = ""

class Injects(Top3):
    unit = "<b>$x$"

class Sideways(Top3):
    better = "bigger"

class Free(Top3):
    tolerance = -1

class Scoreless(Top3):
    score = None

class Needs(Top3):
    def __init__(self, classes): ...

class Vector(Top3):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

class Detached(Top3):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets).detach()

class OneNumber(Top3):
    def score(self, outputs, targets):
        return super().score(outputs, targets).double().mean()

class Python(Top3):
    def score(self, outputs, targets):
        return 0.5

class Counts(Top3):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)

class Ignores(Top3):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, ignore_index=6)

class IgnoresRightly(Top3):
    def loss(self, outputs, targets):
        total = F.cross_entropy(outputs, targets, ignore_index=6, reduction="sum")
        return total, (targets != 6).sum()

class WithoutOne(Top3):
    def loss(self, outputs, targets):
        total = F.cross_entropy(outputs, targets, ignore_index=1, reduction="sum")
        return total, (targets != 1).sum()

    def score(self, outputs, targets):
        right = (outputs.argmax(-1) == targets).double()
        return right.masked_fill(targets == 1, float("nan"))

class ByClass(Top3):
    def loss(self, outputs, targets):
        weight = torch.linspace(0.1, 3, outputs.shape[-1]).to(outputs)
        return F.cross_entropy(outputs, targets, weight=weight)

class Pairs(Top3):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

class PairsWeighed(Pairs):
    def loss(self, outputs, targets):
        return len(targets) * super().loss(outputs, targets), len(targets)

class Below(Top3):
    def loss(self, outputs, targets):
        return outputs.sum(), -1.0

class Three(Top3):
    def loss(self, outputs, targets):
        return outputs.sum(), 1.0, 2.0

class Half(Top3):
    def loss(self, outputs, targets):
        return F.mse_loss(outputs, targets)

class Odd(Top3):
    targets = "floats"

class Regression:
    score_name, unit, better, counts, tolerance = "error", "m", "lower", "images", 2.0
    targets = "values"

    def loss(self, outputs, targets):
        return F.mse_loss(outputs, targets)

    def score(self, outputs, targets):
        return (outputs - targets).abs()

class Spread(Regression):  # a mean and a logarithm of a variance for each value
    def outputs(self, targets, classes):
        return (*targets, 2)

    def loss(self, outputs, targets):
        return F.gaussian_nll_loss(outputs[..., 0], targets, outputs[..., 1].exp())

    def score(self, outputs, targets):
        return (outputs[..., 0] - targets).abs()

class Mask(Regression):
    def loss(self, outputs, targets):
        return F.binary_cross_entropy(outputs.sigmoid(), targets)

class Boxes(Regression):  # the first value of a target is the number of a class
    def outputs(self, targets, classes):
        return (targets[0], classes + 1)

    def loss(self, outputs, targets):
        classes = F.cross_entropy(outputs[:, :2], targets[:, 0].long())
        return classes + F.smooth_l1_loss(outputs[:, 2:], targets[:, 1:])

    def score(self, outputs, targets):
        return outputs[:, :2].argmax(1) == targets[:, 0]

class Ends(Mask):
    def loss(self, outputs, targets):
        raise SystemExit("not written yet")

class Ordinal(Boxes):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs[:, :2], targets[:, 0].long() - 1)

class Empty(Regression):
    def outputs(self, targets, classes):
        return ()

class Raises(Regression):
    def outputs(self, targets, classes):
        return targets[7]
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch, request) -> str:
    name = f"tasks_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def checked(call: str) -> tasks.Task:
    task = tasks.create_own_task(call)
    task_trial.check_task_outputs(task, tasks.OwnTask(call), 10, [2])
    return task


def test_a_task_of_ones_own_says_its_score_and_is_summed(own_tasks):
    task = checked(f"{own_tasks}:Top3")
    sums = tasks.compute_loss_and_score_sums(task, torch.eye(5), torch.arange(5))
    assert tasks.compute_test_loss_and_score(sums.tolist())[1:] == (1.0, 0.0, 0)
    facts = tasks.describe_task(task, "mine", 10, (1, 8, 8), 1.2)
    assert (facts["score"], facts["guess"], facts["least_loss"]) == ("top-3 accuracy", None, None)


@pytest.mark.filterwarnings("ignore:Using a target size")  # one of the mistakes
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Absent", "has no 'Absent'"),
        ("Nameless", "its attribute score_name is ''; it must be a short text"),
        ("Injects", "its attribute unit is '<b>\\$x\\$'; it must be a short text"),
        ("Sideways", "its attribute better is 'bigger'; it must be higher or lower"),
        ("Free", "its attribute tolerance is -1; it must be a number"),
        ("Scoreless", "no method score"),
        ("Odd", "its attribute targets is 'floats'; it must be classes or values"),
        ("Needs", "called without arguments, raised TypeError"),
        ("Vector", r"a tensor \[2\]; return the mean"),
        ("Detached", "without a gradient; return the mean"),
        ("OneNumber", r"a tensor \[\]; return a score per sample"),
        ("Python", "its method score returned a float; return a tensor"),
        ("Below", r"the weight -1.0; return a number of at least 0"),
        (
            "Three",
            r"method loss returned a \(Tensor, float, float\); return a tensor, or \(sum, weight\)",
        ),
        ("Half", r"outputs \[2, 10\] in float32 and targets \[2\], raised RuntimeError"),
    ],
)
def test_a_task_that_is_none_says_why_in_one_sentence(own_tasks, name, says):
    with pytest.raises(ModelError, match=says) as e:
        checked(f"{own_tasks}:{name}")
    assert str(e.value).startswith(f"task '{own_tasks}:{name}'")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Top3", (False, True)),
        ("Counts", (True, True)),
        ("Ignores", (False, False)),
        ("IgnoresRightly", (True, True)),
        ("ByClass", (False, False)),
        ("Pairs", (False, False)),
        ("PairsWeighed", (True, False)),
    ],
)
def test_a_loss_that_is_no_mean_over_its_parts_is_known(own_tasks, name, kind):
    task = tasks.create_own_task(f"{own_tasks}:{name}")
    for classes in (10, 7, 12):
        assert task_trial.check_task_outputs(task, tasks.OwnTask(name), classes, [2]) == kind
    facts = tasks.describe_task(task, name, 10, (1, 8, 8), None, tasks.LossKind(*kind))
    assert (facts["loss_weighs"], facts["loss_adds_up"]) == kind


class _Sizes(TorchDispatchMode):
    """Notes the most numbers of a tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not isinstance(made, FakeTensor):
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize(
    ("name", "positions", "fails"),
    [("Texts", 16, None), ("LongTexts", 300, None), ("BadTexts", 16, r"outputs \[2, 16, 4000\]")],
)
def test_a_task_of_long_texts_is_tried_on_a_few_positions(own_tasks, name, positions, fails):
    """All of them are taken where a task asks for them, which is seen without their memory."""
    s = settings("single", own_task={"call": f"{own_tasks}:{name}"})
    with _Sizes() as sizes:
        if fails is None:
            _, kind = task_trial.run_task_trial(s, (300,), 4000, has_values=False)
            assert kind == (name == "LongTexts", True)
        else:
            with pytest.raises(ModelError, match=fails):
                task_trial.run_task_trial(s, (300,), 4000, has_values=False)
    assert sizes.most <= max(2 * positions * 4000, task_trial.TRIED_NUMBERS)


def test_the_kind_of_a_loss_of_texts_and_of_values_is_known(own_tasks):
    class Padded(tasks.NextToken):
        def loss(self, outputs, targets):
            found = torch.nn.functional.cross_entropy(
                outputs.flatten(0, -2), targets.flatten(), ignore_index=11
            )
            return found

    for task, targets, kind in (
        (tasks.NextToken(), [2, 5], (False, True)),
        (Padded(), [2, 5], (False, False)),
        (tasks.create_own_task(f"{own_tasks}:Regression"), [2, 3], (False, True)),
    ):
        assert task_trial.check_task_outputs(task, tasks.OwnTask("x"), 12, targets) == kind


@pytest.mark.parametrize("parts", [[6], [1, 2, 3], [2, 2, 2]])
def test_what_does_not_count_is_in_no_loss_and_no_score(parts):
    """Nor in the standard error: that of a ratio of sums over samples."""

    class Some(tasks.NextToken):
        def loss(self, outputs, targets):
            found = super().score(outputs, targets)
            return found[targets != 0].sum(), (targets != 0).sum()

        def score(self, outputs, targets):
            return super().score(outputs, targets).masked_fill(targets == 0, math.nan)

    torch.manual_seed(0)
    outputs, targets = torch.randn(6, 4, 5), torch.randint(1, 5, (6, 4))
    targets[1], targets[3, 1:], targets[5, :2] = 0, 0, 0
    sums = sum(
        tasks.compute_loss_and_score_sums(Some(), x, y)
        for x, y in zip(outputs.split(parts), targets.split(parts), strict=True)
    )
    found = tasks.compute_test_loss_and_score(sums.tolist())
    each = tasks.NextToken().score(outputs.double(), targets)
    counts = targets != 0
    assert found.loss == pytest.approx(float(each[counts].mean()), rel=1e-12)
    assert found.score == pytest.approx(found.loss, rel=1e-12)
    assert found.left_out == int((~counts).sum())
    off = ((each - found.score) * counts).sum(1)
    assert found.error == pytest.approx(float(off.square().sum().sqrt() / counts.sum()), rel=1e-9)


def test_where_nothing_counts_the_loss_is_0_and_there_is_no_score():
    found = tasks.compute_test_loss_and_score([0.0] * 7 + [12.0])
    assert found.loss == 0.0
    assert math.isnan(found.score)
    assert found.left_out == 12


@pytest.mark.parametrize("name", ["Mask", "Boxes"])
def test_a_loss_may_take_only_targets_that_the_data_have(own_tasks, name):
    """Random numbers are outside of 0 to 1 and are no numbers of classes."""
    call = f"{own_tasks}:{name}"
    task = tasks.create_own_task(call)
    assert task_trial.check_task_outputs(task, tasks.OwnTask(call), 3, [2, 3]) == (False, True)


def test_the_message_on_a_loss_that_fails_says_which_targets_it_got(own_tasks):
    for name, error in (("Ordinal", "IndexError"), ("Ends", "SystemExit: not written yet")):
        call = tasks.OwnTask(f"{own_tasks}:{name}")
        task = tasks.create_own_task(call.call)
        with pytest.raises(ModelError, match=rf"targets \[2, 3\], all 0, raised {error}"):
            task_trial.check_task_outputs(task, call, 3, [2, 3])


def test_a_task_may_learn_values_and_take_other_outputs(own_tasks):
    for name, shape in (("Regression", [2, 3]), ("Spread", [2, 3, 2])):
        call = f"{own_tasks}:{name}"
        task = tasks.create_own_task(call)
        assert tasks.compute_output_shape(task, [2, 3], 3) == shape
        task_trial.check_task_outputs(task, tasks.OwnTask(call), 3, [2, 3])
        sums = tasks.compute_loss_and_score_sums(task, torch.ones(2, *shape[1:]), torch.zeros(2, 3))
        found = tasks.compute_test_loss_and_score(sums.tolist())
        assert found.score == 1.0
        assert found.loss > 0
    with pytest.raises(
        ModelError, match=r"outputs returned \[\] for targets of shape \[2, 3\]; return the shape"
    ):
        tasks.compute_output_shape(tasks.create_own_task(f"{own_tasks}:Empty"), [2, 3], 3)
    with pytest.raises(ModelError, match=r":Raises': its method outputs raised IndexError"):
        tasks.compute_output_shape(tasks.create_own_task(f"{own_tasks}:Raises"), [2, 3], 3)


@pytest.mark.parametrize("name", [None, "Top3", "Regression"])
def test_data_and_a_task_that_do_not_go_together_are_told_in_one_sentence(own_tasks, name):
    s = settings("ddp", own_task=name and {"call": f"{own_tasks}:{name}"})
    fits = name == "Regression"
    tasks.get_task(s, (1, 8, 8), fits)
    with pytest.raises(
        ModelError, match="it learns values" if fits else "it learns class numbers"
    ) as e:
        tasks.get_task(s, (1, 8, 8), not fits)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_a_cell_trains_by_a_task_of_ones_own_and_its_record_names_it(
    own_tasks, tmp_path, start_cell, warm
):
    code = users_code.compute_code_fingerprint(f"{own_tasks}:Top3", [tmp_path])
    s = settings("ddp", own_task={"call": f"{own_tasks}:Top3"} | code)
    launched = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
    launched.finish_with(0)
    found = record.read_record(launched.record)
    assert found["task"]["name"] == f"{own_tasks}:Top3"
    assert found["task"]["own"]["files"] == [f"{own_tasks}.py"]
    assert found["task"]["own"]["sha256"] == code["sha256"]
    assert found["score"]["final"] == 1.0  # of three classes the right one is among three
    assert found["score"]["per_epoch"][-1]["test_loss"] > 0.1
    assert unusable(found) == []


@pytest.mark.slow
def test_cells_by_a_sum_and_its_weight_agree_whatever_trains_them(
    own_tasks, tmp_path, start_cell, warm
):
    call = f"{own_tasks}:WithoutOne"
    spec = {"call": call} | users_code.compute_code_fingerprint(call, [tmp_path])
    ends = []
    for strategy, gpus in (("single", 1), ("ddp", 2), ("ps-sync", 2)):
        s = settings(
            strategy,
            gpus=gpus,
            per_worker_batch=16 // gpus,
            own_task=spec,
            precision="fp64",
            epochs=2,
        )
        launched = start_cell(s, env=warm | {users_code.CODE_VARIABLE: str(tmp_path)})
        launched.finish_with(0)
        found = record.read_record(launched.record)
        assert found["task"]["loss_weighs"]
        assert found["task"]["loss_adds_up"]
        assert found["strategy"]["traits"]["equals_ddp"]
        ends.append(found["score"]["per_epoch"])
    for epochs in zip(*ends, strict=True):
        assert epochs[0]["answers_left_out"] > 0
        for key in ("train_loss", "test_loss", "score", "score_error", "answers_left_out"):
            expected = pytest.approx(epochs[0][key], rel=1e-9)
            assert [other[key] for other in epochs[1:]] == [expected, expected], key


# --- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "next-token"}, "the data set is images, whose task is classification"),
        ({"task": "regression"}, "neither one of classification, next-token, masked-token, text-"),
        ({"steps": 3}, "give either epochs or steps"),
        ({"epochs": None}, "give either epochs or steps"),
        ({"epochs": None, "steps": 9, "target_score": 0.5}, "nothing is evaluated with steps"),
        ({"target_score": 90}, "the score is accuracy; give a share such as 0.9"),
        ({"epochs": None, "steps": 9, "lr_warmup_steps": 9}, "would never be reached"),
        ({"target_accuracy": 0.9}, "target_score"),
    ],
)
def test_a_mistake_about_the_task_is_told_before_any_job(changes, says):
    with pytest.raises(ConfigError, match=says) as e:
        study_of({"call": "my_net.Net"}, models=["vgg-compact"], **changes)
    assert "\n" not in str(e.value)


def test_the_tolerance_of_a_score_that_nobody_has_is_a_mistake():
    raw = {"study": "s", "decide": {"score_tolerance": {"acuracy": 1}}, "studies": {"s": {}}}

    raw["studies"]["s"] = {"experiments": {"e": experiment(models=["vgg-compact"])}}
    with pytest.raises(ConfigError, match=r"acuracy.*is not a score.*accuracy"):
        load_config(raw)


def test_a_built_in_task_by_name_is_the_data_sets_own_and_retrains_nothing(tmp_path):
    (tmp_path / "my_tasks.py").write_text("class Mine: ...\n")
    told = []
    for task in (None, "classification", "my_tasks:Mine"):
        _, study = study_of({"call": "x.y"}, tmp_path, models=["vgg-compact"], task=task)
        told.append(study.settings(study.cells[0]).own_task)
    assert told[:2] == [None, None]
    assert told[2]["call"] == "my_tasks:Mine"
    kept = study.build_training_config() | {"own_code": study.describe_own_code()}
    (tmp_path / "my_tasks.py").write_text("class Mine: changed = 1\n")
    _, changed = study_of({"call": "x.y"}, tmp_path, models=["vgg-compact"], task="my_tasks:Mine")
    assert changed.settings(changed.cells[0]).own_task["sha256"] != told[2]["sha256"]
    again = type(study)(json.loads(json.dumps(kept)), "s")
    assert again.settings(again.cells[0]).own_task == told[2]


# --- steps ----------------------------------------------------------------------------------------


def test_a_plan_of_steps_ends_within_its_last_epoch():
    plan = TicketPlan(3, 4, 2, steps=9)
    assert len(plan) == 18
    assert [plan.count_epoch_tickets(epoch) for epoch in range(3)] == [8, 8, 2]
    assert plan.get_ticket(17)[1:] == (2, 0, 1)
    log = EpochLog(plan, None)
    store = type("Store", (), {"shards": {}, "buffers": None})
    for number in range(18):
        log.count_completed_ticket(number, float(number), store)
    assert log.is_complete
    assert [end["end_s"] for end in log.ends] == [7.0, 15.0, 17.0]
    with pytest.raises(ValueError, match="must end within the last epoch"):
        TicketPlan(3, 4, 2, steps=8)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("ps-async", 2)])
def test_steps_start_the_data_over_and_leave_no_score(strategy, workers, start_cell, warm):
    """64 samples are 4 batches of 16: 10 steps are two and a half passes."""
    s = settings(strategy, epochs=None, steps=10)
    launched = start_cell(s, env=warm)
    launched.finish_with(0)
    found = record.read_record(launched.record)
    assert found["status"] == "ok"
    assert found["batch"]["samples_seen"] == 160
    assert len(found["time"]["epoch_times_s"]) == 3
    assert sum(worker["steps"] for worker in found["workers"]) == 20
    assert (found["score"]["final"], found["score"]["best"]) == (None, None)
    assert found["score"]["per_epoch"] == []
    assert found["time"]["eval_s"] is None
    assert found["compute"]["forward_flops_per_sample"] > 0
    assert unusable(found) == []
    odd = copy.deepcopy(found)
    odd["batch"]["samples_seen"] -= 16
    assert unusable(odd)


# --- the analysis ---------------------------------------------------------------------------------


def as_text(rec: dict) -> dict:
    """A constructed record as one of a text: the test loss, above the least possible, is the score."""
    rec["task"] |= {
        "name": "next-token", "score": "loss", "unit": "nats/token", "better": "lower",
        "tolerance": 0.05, "guess": math.log(64), "counts": "tokens", "counts_per_sample": 32,
        "least_loss": MINIMUM,
    }  # fmt: skip
    for entry in rec["score"]["per_epoch"]:
        entry["test_loss"] += MINIMUM
        entry |= {"score": entry["test_loss"], "score_error": 0.01}
    last = rec["score"]["per_epoch"][-1]["score"]
    rec["score"] |= {"final": last, "best": last}
    return rec


def as_steps(rec: dict) -> dict:
    """A constructed record as one of a cell that was trained for steps."""
    steps = rec["batch"]["steps_per_epoch"] * rec["settings"]["epochs"]
    rec["settings"] |= {"epochs": None, "steps": steps}
    rec["score"] |= {"final": None, "best": None, "per_epoch": []}
    return rec


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, pd.DataFrame, list[dict]]:
    """Three experiments of one study: images, a text, and a cell of steps."""
    names, root = ("single", "ddp", "ps-async"), tmp_path_factory.mktemp("study")
    kinds = {"images": lambda r: r, "text": as_text, "steps": as_steps}
    cells = [
        c
        for name in kinds
        for c in fixture.expand(names, ("vgg16",), (1, 2), experiment=name, dataset=name)
    ]
    folder = fixture.write_study(root, cells, change=lambda c, r: kinds[c.experiment](r))
    asked = collect.Expectations(target_scores_by_experiment={"text": 1.7, "images": 0.9})
    assert (
        collect.collect_records(cells, folder, folder / "cells.csv", folder / "epochs.csv", asked)
        == []
    )
    found = [record.read_record(c.record_path(root)) for c in cells]
    return folder, read_cells(folder / "cells.csv"), found


@pytest.mark.slow
def test_experiments_of_different_tasks_stand_side_by_side(study, tmp_path):
    folder, cells, records = study
    assert [f for f in audit.audit_cells(cells, records) if f["severity"] != "note"] == []
    summary = build_summary_table(cells)
    by = dict(list(cells.groupby("experiment", sort=False)))
    measure = {n: map_measures_by_name(rows) for n, rows in by.items()}
    assert measure["images"]["score"].heading == "Test accuracy after the last epoch (%)"
    assert measure["text"]["score"].heading == "Test loss after the last epoch (nats/token)"
    assert measure["images"]["throughput"].unit == "images/s"
    assert measure["text"]["throughput"].unit == "tokens/s"
    units = summary[summary["measure"] == "score"].groupby("experiment")["unit"].first()
    assert (units["images"], units["text"]) == ("%", "nats/token")
    scored = summary[(summary["measure"] == "score") & (summary["strategy"] == "ddp")]
    texts = dict(zip(scored["experiment"], scored["text"], strict=False))
    assert texts["steps"] == "n/a (not evaluated: 2340 steps)"
    assert 1.5 < float(texts["text"]) < 1.7
    ddp = cells[(cells["strategy"] == "ddp") & (cells["gpus"] == 2)].set_index("experiment")
    assert ddp.loc["text", "perplexity"] == pytest.approx(math.exp(ddp.loc["text", "score_final"]))
    assert ddp.loc["text", "least_loss"] == MINIMUM
    assert pd.isna(ddp.loc["images", "perplexity"])
    # The loss is reached from above: 1.7 by the fourth of six epochs.
    assert 0 < ddp.loc["text", "time_to_target_s"] < ddp.loc["text", "train_time_s"]
    rates = summary[(summary["measure"] == "throughput") & (summary["strategy"] == "single")]
    rates = rates.set_index("experiment")["value"]
    single = by["text"][by["text"]["strategy"] == "single"].iloc[0]
    assert rates["text"] == pytest.approx(32 * single["throughput_samples_per_s"])
    # Tables and figures name it, with the least possible loss.
    tables.write_and_count_tables(cells, summary, tmp_path)
    text = (tmp_path / "text" / "score.md").read_text()
    assert "The lowest possible loss on this data set is 1.500 nats/token." in text
    assert "accuracy of" not in text.lower()
    assert not (tmp_path / "steps" / "score.md").exists()
    data = build_figure_data(cells, read_epochs(folder / "epochs.csv"), summary)
    drawn = {one.experiment: one for one in data}
    assert not {name for name, _ in iter_figure_names_and_worker_counts(drawn["steps"])} & {
        "score",
        "score_over_time",
    }
    for name, count in (("score", 2), ("score_over_time", None), ("tradeoff", None)):
        figure = draw_figure(name, drawn["text"], count)
        assert "nats/token" in figure.caption
        labels = [t.get_text() for t in figure.figure.axes[0].texts]
        assert ("least possible: 1.5" in labels) == (name != "tradeoff")
        plt.close(figure.figure)
    assert report.format_training_length(by["steps"]) == "2340 steps, no score"
    told = {
        line["experiment"]: line["score"]
        for line in report.iter_cell_table_rows(cells, folder, folder)
    }
    assert told["images"].endswith(" %")
    assert told["text"].endswith(" nats/token")
    assert told["steps"] == ""


LOSS = {
    "task": "next-token", "score_name": "loss", "score_unit": "nats/token", "score_better": "lower",
    "score_tolerance": 0.05, "throughput_unit": "tokens", "counts_per_sample": 32, "score_chance_level": 4.2,
    "dataset": "text", "test_samples": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "error", "tolerance", "verdict"),
    [
        (1.60, 0.001, {}, "worse score"),  # 0.1 more than ddp, and 0.05 are allowed
        (1.60, 0.001, {"loss": 0.2}, "recommended"),
        (1.60, 0.001, {"accuracy": 50}, "worse score"),  # another score's
        (1.60, 0.05, {}, "recommended"),  # chance explains it
        (1.40, 0.001, {}, "recommended"),  # a lower loss is better
    ],
)
def test_the_decision_goes_by_the_direction_and_the_tolerance_of_the_score(
    loss, error, tolerance, verdict
):
    rows = [
        cell("ddp", 30.0, **LOSS, score_error=error) | {"score_final": 1.5},
        cell("ps-async", 10.0, **LOSS, score_error=error) | {"score_final": loss},
    ]
    found = decided(rows, score_tolerance=tolerance)
    assert standings(found)["ps-async", 4] == verdict
    words = " ".join((found.headline, found.reason, *found.changes, " ".join(found.sure)))
    words += str(found.excluded)
    assert "accuracy" not in words
    assert "%, " not in found.reason
    if verdict == "worse score":
        assert "1.600 nats/token, 0.100 nats/token more than ddp on 4 (0.05 allowed" in words
    if loss == 1.4:
        assert standings(found)["ddp", 4] == "worse score"


def test_cells_of_steps_are_decided_by_time_alone_and_it_is_said():
    rows = [
        cell(name, t, steps=100) | {"score_final": None}
        for name, t in (("ddp", 30.0), ("ps-async", 10.0))
    ]
    found = decided(rows)
    assert found.choice.strategy == "ps-async"
    assert (found.short_answer.score, found.short_answer.score_note) == (
        "not measured",
        "equal scores are assumed",
    )
    assert (
        "No score was measured, since `steps` skips evaluation; equal scores are assumed."
        in " ".join(found.sure)
    )
    assert found.confidence != "high"


def test_a_loss_no_better_than_guessing_is_below_the_floor(study):
    _, cells, _ = study
    cells = cells.copy()
    bad = (cells["experiment"] == "text") & (cells["strategy"] == "ps-async") & (cells["gpus"] == 2)
    cells.loc[bad, "score_final"] = 4.0
    (found,) = RULE["score-below-floor"].check(audit.AuditData(cells))
    assert found.coordinates["strategy"] == "ps-async"
    assert found.values_text.startswith("4.000 nats/token; single on 1 reaches 1.6")


def test_a_score_that_guessing_may_reach_by_chance_is_told_with_that_score(study):
    _, cells, _ = study
    cells = cells[cells["strategy"] == "single"].assign(
        score_final=0.7, score_chance_level=0.5, test_samples=32, counts_per_sample=1.0
    )
    cells = cells[cells["experiment"] != "text"]
    said = {found.values_text for found in RULE["score-below-floor"].check(audit.AuditData(cells))}
    assert said == {"70.0%; guessing reaches 50.0%, by chance even 76.5%"}
