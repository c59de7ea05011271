"""What a trainer reports: by the library of 30 lines, and by the callbacks of Lightning and transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import stratbench.report
from stratbench.extensions.commands.reading import read_report
from stratbench.report import VARIABLE, Report


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Where reports go; returns a function that reads it."""
    path = tmp_path / "report.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return lambda: read_report(path)


class Loss:
    """A loss on a device: to read it is to wait."""

    reads = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        Loss.reads += 1
        return self.value


def test_what_is_reported_is_read_again(told):
    report = Report(parameters=7, optimizer="sgd")
    report.step(8, 2.0)
    report.pause()
    report.score(0.5, test_loss=1.0, error=0.1)
    report.step(4)
    found = told()
    assert (found.reported_facts["parameters"], found.reported_facts["workers"]) == (7, 1)
    assert found.samples_per_step == [8, 4]
    assert (found.scores[0].score, found.scores[0].train_loss) == (0.5, 2.0)


def test_no_step_waits_for_its_loss(told):
    Loss.reads = 0
    report = Report()
    for value in (1.0, 3.0):
        report.step(8, Loss(value))
    assert Loss.reads == 0
    report.score(0.5)
    assert told().scores[0].train_loss == 2.0


def test_only_the_first_process_reports(told, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    report = Report()
    report.step(8)
    report.score(1.0)
    assert list(tmp_path.iterdir()) == []


def test_outside_of_a_cell_nobody_writes(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    Report(parameters=1).step(8)
    assert list(tmp_path.iterdir()) == []


def test_the_library_is_small_and_needs_nothing_but_python(tmp_path):
    """Its file alone, copied, reports as well."""
    source = Path(stratbench.report.__file__)
    (tmp_path / "my_report.py").write_text(source.read_text())
    program = (
        "import sys, my_report\nr = my_report.Report(parameters=3)\nr.step(8, 1.0)\n"
        "assert not [m for m in sys.modules if m in ('torch', 'numpy', 'stratbench')]"
    )
    environment = {VARIABLE: str(tmp_path / "r"), "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=True)
    assert read_report(tmp_path / "r").samples_per_step == [8]
    lines = source.read_text().split("class Report")[1].splitlines()
    code = [x for x in lines if x.strip() and not x.strip().startswith(('"""', "#"))]
    assert len(code) < 50


@pytest.fixture
def callback(monkeypatch):
    """The callback of a library, whose own base class is a stand-in."""

    def made(library: str, module: str, base: str):
        stand_in = ModuleType(module)
        setattr(stand_in, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, module.partition(".")[0], stand_in)
        monkeypatch.setitem(sys.modules, module, stand_in)
        monkeypatch.delitem(sys.modules, f"stratbench.report.{library}", raising=False)
        return import_module(f"stratbench.report.{library}").ReportCallback

    return made


NETWORK = SimpleNamespace(parameters=lambda: [SimpleNamespace(numel=lambda: 5)] * 2)


def test_lightning_reports_steps_of_the_optimizer_and_scores(told, callback):
    made = callback("lightning", "lightning.pytorch", "Callback")("val_acc")
    trainer = SimpleNamespace(
        global_step=0,
        world_size=2,
        accumulate_grad_batches=2,
        sanity_checking=True,
        callback_metrics={"val_acc": 0.75},
    )
    made.on_validation_start(trainer, NETWORK)  # before training: to see whether it works
    made.on_validation_end(trainer, NETWORK)
    trainer.sanity_checking = False
    made.on_train_start(trainer, NETWORK)
    outputs = {"loss": SimpleNamespace(detach=lambda: 0.75)}  # of a half
    for batch in range(4):  # two batches make a step
        trainer.global_step = (batch + 1) // 2
        made.on_train_batch_end(trainer, NETWORK, outputs, [range(8), None], batch)
    made.on_validation_start(trainer, NETWORK)
    made.on_validation_end(trainer, NETWORK)
    found = told()
    assert found.reported_facts["parameters"] == 10
    assert found.samples_per_step == [32, 32]
    assert (found.scores[0].score, found.scores[0].train_loss) == (0.75, 1.5)


def test_transformers_reports_steps_and_the_scores_of_evaluations(told, callback):
    made = callback("transformers", "transformers", "TrainerCallback")("eval_loss")
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2, world_size=2)
    control = SimpleNamespace(should_evaluate=False)
    made.on_train_begin(args, None, control, model=NETWORK)
    made.on_step_end(args, None, control)
    control.should_evaluate = True
    made.on_step_end(args, None, control)
    made.on_epoch_end(args, None, control)
    made.on_evaluate(args, None, control, metrics={"eval_loss": 2.5})
    control.should_evaluate = False
    made.on_step_end(args, None, control)
    found = told()
    assert found.samples_per_step == [16, 16, 16]
    assert found.scores[0].score == 2.5


def test_a_report_is_json_a_line(told, tmp_path):
    Report(parameters=1).step(8, float("nan"))
    lines = (tmp_path / "report.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "step"]
    assert told().first_nonfinite_value_name == "the training loss"
