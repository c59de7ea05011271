"""What a strategy promises, held of each that is registered: two steps, as planned and without a finding."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from late_gradients import Late

from launching import WORKFLOW, LaunchedCell, each_strategy
from stratbench.analysis.records import collect
from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.options import has_own_summary
from stratbench.cell.record import Record
from stratbench.extensions.audit import audit
from stratbench.extensions.plan import against_records as against
from stratbench.extensions.plan.device_rates import CPU_PROCESS_BYTES
from stratbench.extensions.plan.footprint.footprint import make_footprint
from stratbench.extensions.plan.needs import compute_data_bytes_on_device, make_cell_to_plan
from stratbench.extensions.servers.policies.averaging import SyncPolicy
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.strategies.base import Traits
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.train import forkserver
from stratbench.workload.data.prepare import prepare_data_set

#: Two steps of the global batch below.
SAMPLES = {"train_samples": 32, "test_samples": 16}
DATASETS = {
    "text": {"source": "markov-text", "vocabulary": 8, "sequence": 32} | SAMPLES,
    "images": {"source": "synthetic", "classes": 3, "size": 16} | SAMPLES,
}
#: What a strategy may be trained on; the first that it takes is.
WORKLOADS = [
    {"gpus": [gpus], "models": [model], "dataset": dataset, "optimizer": optimizer}
    for gpus, optimizer, (model, dataset) in itertools.product(
        (2, 1, 4), ("sgd", "adamw"), (("vgg-compact", "images"), ("gpt-compact", "text"))
    )
]
LR = {"sgd": 0.05, "adamw": 0.005}
#: The strategy that each is compared with by the audit.
RIVAL = "ddp"

footprint_of = cache(make_footprint)


class Trained(NamedTuple):
    """A study of a strategy and its rival, with the strategy's cell and both records in place."""

    config: Mapping[str, Any]
    study: Study
    cell: Cell
    record: Record

    @property
    def folder(self) -> Path:
        return Path(self.config["results"]) / self.study.name


def study_of(name: str, results: Path) -> tuple[dict[str, Any], Study]:
    """A study of the strategy and the rival on what the strategy takes; ConfigError where that is nothing."""
    refusals = []
    for workload in WORKLOADS:
        experiment = workload | {
            "strategies": list(dict.fromkeys([name, RIVAL])), "epochs": 1, "global_batch": 16,
            "device": "cpu", "lr": LR[workload["optimizer"]],
        }  # fmt: skip
        raw = {
            "study": "each", "results": str(results), "datasets": DATASETS,
            "studies": {"each": {"experiments": {"one": experiment}}},
        }  # fmt: skip
        try:
            config, study = load_config(raw)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        if name in {cell.strategy for cell in study.cells}:
            return config, study
    raise ConfigError("\n".join(refusals))


@pytest.fixture(scope="module")
def rivals() -> dict[str, dict[str, str]]:
    """Of what was trained for another strategy already: the files by their names, by the settings."""
    return {}


@pytest.fixture
def train(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str], tmp_path: Path, rivals: dict
) -> Callable[[str], Trained]:
    """A function that trains a registered strategy by the real launcher, and the rival on the same.

    Given the folder of a workflow, its code is that.
    """

    def trained(name: str, workflow: Path = WORKFLOW) -> Trained:
        config, study = study_of(name, tmp_path)
        env = dict(warm)
        if workflow != WORKFLOW:  # the shared server has its code from there
            del env[forkserver.FOLDER_VARIABLE]
        for cell in study.cells:
            s = study.settings(cell)
            folder = cell.record_path(tmp_path).parent
            if (before := rivals.get(s.as_json())) is not None:
                folder.mkdir(parents=True)
                for file, text in before.items():
                    (folder / file).write_text(text)
                continue
            prepare_data_set(cell.dataset, tmp_path / "data", spec=s.data_spec)
            launched = start_cell(
                s, cell=cell, data_dir=tmp_path / "data", env=env, workflow=workflow
            )
            launched.finish_with(0)
            if cell.strategy == RIVAL:
                rivals[s.as_json()] = {p.name: p.read_text() for p in folder.iterdir()}
        [cell] = [cell for cell in study.cells if cell.strategy == name]
        return Trained(config, study, cell, record.read_record(cell.record_path(tmp_path)))

    return trained


def findings(trained: Trained) -> list[str]:
    """What the audit says of the records, but for notes.

    A busy machine explains doubts of times, and two steps that little was learnt.
    """
    cells, out = (trained.folder / name for name in ("cells.csv", "audit.csv"))
    collect.collect_records(
        trained.study.cells, trained.folder, cells, trained.folder / "epochs.csv"
    )
    assert audit.main(["--cells", str(cells), "--out", str(out)]) == 0
    affects = {rule.id: rule.affects for rule in audit.RULES}
    return [
        f"{f.rule}: {f.figures}"
        for f in pd.read_csv(out).itertuples()
        if f.severity == "unusable"
        or (f.severity == "warning" and affects[f.rule] != "time" and f.rule != "score-below-floor")
    ]


def differences(trained: Trained) -> Iterator[str]:
    """In what the record of a cell on CPUs is not what was planned."""
    s, memory = (
        make_cell_to_plan(trained.config, trained.study, trained.cell),
        trained.record["memory"],
    )
    made = footprint_of(s.request)
    # The record has the model states of the worker that holds most.
    states = (stage.model_states_bytes for stage in made.footprints_of_stages)
    most_states = max(states, key=lambda held: sum(held.values()))
    if most_states != memory["model_states"]:
        yield f"model states: planned {most_states}, held {memory['model_states']}"
    planned_bytes = against.predict_recorded_sent_bytes_per_step(s, made)
    sent_bytes = (trained.record["communication"] or {}).get("sent_bytes_per_step")
    if sent_bytes is not None and sent_bytes != pytest.approx(planned_bytes, rel=1e-6):
        yield f"bytes sent: planned {planned_bytes}, counted {sent_bytes}"
    # Resident memory is that of the tensors, and of what a process holds beside.
    least_bytes = made.compute_training_peak(
        s.samples_per_step
    ).n_bytes + compute_data_bytes_on_device(s)
    most_bytes = (
        made.compute_needed_bytes(s.samples_per_step)
        + compute_data_bytes_on_device(s)
        + CPU_PROCESS_BYTES
    )
    if not least_bytes <= memory["peak_bytes"] <= most_bytes:
        yield f"peak: planned {least_bytes} to {most_bytes}, measured {memory['peak_bytes']}"


def check(trained: Trained) -> None:
    assert trained.record["status"] == "ok"
    assert sum(worker["steps"] for worker in trained.record["workers"]) >= 2
    assert list(differences(trained)) == []
    assert findings(trained) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", each_strategy())
def test_two_steps_go_as_planned_and_the_audit_finds_nothing(name, train):
    check(train(name))


# ---------------------------------------------------------------- one made from another


@pytest.fixture
def late(monkeypatch, tmp_path: Path) -> Path:
    """Registers `late_gradients.Late`, here and in a copy of the workflow, whose folder this is."""
    monkeypatch.setitem(REGISTRY, "late", "late_gradients:Late")
    copy = tmp_path / "code" / "workflow"
    shutil.copytree(WORKFLOW, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    strategies = copy / "stratbench" / "strategies"
    shutil.copy(Path(__file__).with_name("late_gradients.py"), strategies)
    registry = (strategies / "__init__.py").read_text(encoding="utf-8")
    entry = 'REGISTRY["late"] = "stratbench.strategies.late_gradients:Late"\n'
    (strategies / "__init__.py").write_text(registry + entry, encoding="utf-8")
    return copy


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_so_do_those_of_a_strategy_made_from_another_one(late, train):
    trained = train("late", late)
    check(trained)
    states = trained.record["memory"]["model_states"]
    assert (
        states["optimizer_bytes"] == 2 * states["gradients_bytes"]
    )  # its momentum and what it keeps


@pytest.mark.slow
def test_the_plan_follows_what_it_wraps_and_keeps(late, tmp_path):
    def planned(name):
        config, study = study_of(name, tmp_path)
        [cell] = [cell for cell in study.cells if cell.strategy == name]
        return footprint_of(make_cell_to_plan(config, study, cell).request)

    ddp, made = planned("ddp").between_steps_bytes, planned("late").between_steps_bytes
    assert made["optimizer"] == ddp["optimizer"] + ddp["parameters"]
    assert made["communication"] == 1 << 10
    assert {k: v for k, v in made.items() if k not in ("optimizer", "communication")} == {
        k: v for k, v in ddp.items() if k != "optimizer"
    }


def test_it_makes_its_own_claims_and_none_of_the_others():
    ddp = get_strategy_class("ddp")
    assert ddp.alike_on_any_count
    assert ddp.rule
    assert (Late.alike_on_any_count, Late.rule) == (False, "")

    class Silent(ddp):
        summary = "another one, that says nothing else"

    class Part(Late):
        """Without a summary it is no strategy of its own."""

    options = ddp.Options()
    assert Silent(options).traits(2) == Traits()
    assert Part(options).traits(2) == Late(options).traits(2)


@pytest.mark.parametrize("name", REGISTRY)
def test_each_is_a_strategy_of_its_own(name):
    assert has_own_summary(get_strategy_class(name)), (
        f"{name} has no `summary` of its own: it has another's claims"
    )


def test_a_policy_made_from_another_one_makes_its_own_claims():
    class Own(SyncPolicy):
        summary = "another one"

    assert SyncPolicy.rigid is not None
    assert Own.rigid is None
