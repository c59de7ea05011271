"""Frozen parameters: a LoRA-like network under every strategy, its records, and faults in them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import odd_networks
import pytest

import invariants
from launching import IN_OUR_LOOP, TINY, LaunchedCell, each_strategy, settings
from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.extensions.plan import check
from stratbench.extensions.plan.footprint import footprint
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.pages.check_text import format_check_result
from stratbench.strategies import get_strategy_class
from stratbench.study.config.config import load_config
from stratbench.workload import users_code
from stratbench.workload.data.datasets import make_dataset_metadata

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALL = "odd_networks.Adapted"
CODE = Path(odd_networks.__file__).parent
#: Of the network with 3 classes, by hand: head, norm, two factors; and frozen the stem and four layers.
TRAINED = 8 * 3 + 3 + 16 + 2 * 16
ALL = TRAINED + 64 * 600 + 600 + 600 * 8 + 8 + 4 * (64 + 8)


@pytest.fixture(scope="module")
def code() -> Iterator[None]:
    """Jobs and this process import the network from the tests' folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(users_code.CODE_VARIABLE, str(CODE))
        patch.setattr(sys, "path", [*sys.path])
        yield


def adapted(strategy: str) -> Settings:
    spec = {
        "call": CALL,
        "kwargs": {},
        "wrap_classes": ["Block"],
    } | users_code.compute_code_fingerprint(CALL, [CODE])
    workers = min(2, get_strategy_class(strategy).max_workers or 2)
    return settings(
        strategy, model="adapted", own_model=spec, gpus=workers, epochs=2, global_batch=16,
        per_worker_batch=16 // workers,
    )  # fmt: skip


@pytest.fixture(scope="module")
def records() -> dict[str, record.Record]:
    """What was trained already, by its strategy."""
    return {}


@pytest.fixture
def trained(
    start_cell: Callable[..., LaunchedCell],
    tiny_data: Path,
    code: None,
    warm: dict[str, str],
    records: dict,
) -> Callable[[str], record.Record]:
    """A function that trains the network by a strategy, once."""

    def train(strategy: str) -> record.Record:
        if strategy not in records:
            environment = warm | {users_code.CODE_VARIABLE: str(CODE)}
            launched = start_cell(adapted(strategy), data_dir=tiny_data, env=environment)
            launched.finish_with(0)
            records[strategy] = record.read_record(launched.record)
        return copy.deepcopy(records[strategy])

    return train


def able() -> list[str]:
    """Strategies but those that need a plan of how layers are divided, which this network does not state.

    Of servers one of each family: a policy sees flat tensors of what is trained, and nothing else.
    """
    first: dict[str, str] = {}
    for name in IN_OUR_LOOP:
        cls = get_strategy_class(name)
        if cls.family != "splits":
            first.setdefault(cls.family if cls.policy else name, name)
    return list(first.values())


@pytest.mark.parametrize("strategy", each_strategy(able()))
def test_a_record_counts_what_is_frozen_and_what_is_trained(trained, strategy):
    """It keeps all invariants, and its states are those of the plan."""
    s, found = adapted(strategy), trained(strategy)
    assert found["status"] == "ok", found["reason"]
    assert found["batch"]["samples_seen"] == 128
    model, compute = found["model"], found["compute"]
    assert (model["parameters"], model["trainable_parameters"]) == (ALL, TRAINED)
    forward, training = (compute[f"{name}_flops_per_sample"] for name in ("forward", "training"))
    assert forward < training < 2 * forward
    planned = footprint.make_footprint(
        Request.from_settings(s, make_dataset_metadata("tiny", TINY), False, s.gpus)
    )
    assert planned.model_states_bytes == found["memory"]["model_states"]
    assert planned.training_flops_per_sample == training


def times(path: str, factor: float) -> Callable[[record.Record], None]:
    """What multiplies a number of a record."""
    *parents, last = path.split(".")

    def edit(found: record.Record) -> None:
        for key in parents:
            found = found[int(key) if key.isdigit() else key]
        found[last] *= factor

    return edit


STATES, SENT = "memory.model_states", "communication.sent_bytes_per_step"
WHOLE = ALL / TRAINED  # what is of all in place of what is trained


@pytest.mark.parametrize(
    ("strategy", "path", "factor", "says"),
    [
        ("ddp", "model.parameters", 1 / WHOLE, "parameters_bytes"),
        ("fsdp", "model.parameters", 1 / WHOLE, "parameters in groups"),
        ("ddp", "model.trainable_parameters", 2 * WHOLE, "model.trainable_parameters"),
        ("ddp", "model.trainable_parameters", 2, "gradients_bytes"),
        ("ddp", f"{STATES}.parameters_bytes", 1 / WHOLE, "parameters_bytes"),
        ("fsdp", f"{STATES}.gradients_bytes", WHOLE, "gradients_bytes"),
        ("zero1", f"{STATES}.optimizer_bytes", WHOLE, "optimizer_bytes"),
        ("ps-sync", f"{STATES}.gradients_bytes", WHOLE, "gradients_bytes"),
        ("ddp", SENT, WHOLE, "2 copies, padded"),
        ("fsdp", SENT, 1 / WHOLE, "2 copies, at most"),
        ("fsdp", SENT, 4, "2 copies, padded"),
        ("ps-sync", SENT, WHOLE, "bytes sent"),
        ("ps-sync", "server.servers.0.shard_numel", WHOLE, "all shards"),
        ("ddp", "compute.achieved_flops_per_s", 2, "achieved_flops_per_s"),
        ("ddp", "compute.training_flops_per_sample", 0.5, "training"),
        ("ddp", "compute.training_flops_per_sample", 3, "training_flops_per_sample"),
    ],
)
def test_a_planted_fault_is_found_beside_frozen_parameters(trained, strategy, path, factor, says):
    found = trained(strategy)
    times(path, factor)(found)
    assert says in "\n".join(invariants.broken(found))


def test_the_check_says_how_many_are_frozen(tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    experiment = {
        "dataset": "digits", "models": ["adapted"], "strategies": ["ddp", "fsdp", "ps-sync"],
        "gpus": [2], "epochs": 1, "global_batch": 16, "lr": 0.02, "device": "cpu",
    }  # fmt: skip
    config, study = load_config(
        {
            "study": "s",
            "code": [str(CODE)],
            "models": {"adapted": {"call": CALL, "wrap_classes": ["Block"]}},
            "studies": {"s": {"experiments": {"e": experiment}}},
        }
    )
    text = format_check_result(check.check_study(config, study))
    everything = ALL + 7 * 9  # ten classes
    assert f"{everything:,} parameters, {ALL - TRAINED:,} of them frozen; takes images" in text
    assert "none of 3 cells would end as unsupported" in text
