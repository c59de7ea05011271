"""What a strategy says of itself holds, and is all that the rest of the workflow judges it by."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from fixture_records import make_record
from policy_reference import hyper_of

from launching import settings
from stratbench import strategies
from stratbench.analysis.decision import decide
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.records import columns
from stratbench.analysis.records.findings import AUDIT_COLUMNS
from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import load_extensions
from stratbench.cell.record import SCHEMA_PATH
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan import servers
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.servers.policies.policies import (
    POLICIES,
    make_policy,
    parse_policy_options,
)
from stratbench.extensions.servers.ps.tickets import TicketPlan
from stratbench.extensions.servers.strategy import get_strategy_of_policy, make_server_configs
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class, get_traits
from stratbench.strategies.base import Traits
from stratbench.strategies.collective import Collective
from virtual_clock import Timing, WorkerLost, simulate

PACKAGE = Path(strategies.__file__).parents[1]
#: Files that name strategies because what they hold is about those: the paper's own, a colour for
#: each, ratios that are defined against one of them.
MAY_NAME = {
    *(
        "extensions/paper/against.py",
        "extensions/paper/numbered.py",
        "analysis/records/measures.py",
    ),
    "extensions/paper/metrics.py",
    "extensions/plan/footprint/trace.py",  # torch's namespace of FSDP's operators
    "extensions/plan/one_model/estimate.py",  # what it takes where its caller names none
    "extensions/elastic/servers/saved_state.py",  # a key of a saved tensor
    "extensions/tune/differences.py",  # kinds of differences
    "extensions/tune/keys.py",  # the default of `baseline`
    "extensions/tune/sieves.py",  # kinds of differences
    "extensions/links/servers.py",  # a server that is timed by itself, of no study
}


class Silent(Collective):
    """A strategy that a user adds, and says nothing of."""

    summary = "says nothing of itself"


class Free(Silent):
    """One that says that it waits for nobody and goes on without a lost worker."""

    summary = "waits for nobody"

    def traits(self, gpus: int) -> Traits:
        return Traits(ends_with_a_worker=False, waits_for_slowest=False)


@pytest.fixture
def registered(monkeypatch):
    for cls in (Silent, Free):
        monkeypatch.setitem(REGISTRY, cls.__name__.lower(), f"{__name__}:{cls.__name__}")


def rows(times: dict[str, float], gpus: int = 4) -> pd.DataFrame:
    """Cells of these strategies with these training times, as `collect` makes them of records."""
    found = []
    for strategy, time_s in times.items():
        cell = Cell("s", "e", strategy, "vgg16", "cifar10", gpus, 0)
        rec = json.loads(json.dumps(make_record(cell)))
        rec["time"]["train_time_s"] = time_s
        rec["score"]["final"] = 0.98
        row = dict.fromkeys(columns.COLUMNS) | cell.as_dict()
        found.append(row | columns.build_row_from_record(rec, Path("none")))
    return pd.DataFrame(found, columns=list(columns.COLUMNS))


def decided(times: dict[str, float], **constraints) -> decide.Decision:
    (found,) = decide.make_decisions(
        rows(times), pd.DataFrame(columns=list(AUDIT_COLUMNS)), Constraints(**constraints)
    )
    return found


def test_a_new_strategy_is_judged_by_what_it_says_and_carefully_where_it_is_silent(registered):
    times = {"ddp": 12.0, "silent": 10.0, "free": 11.0}
    assert decided(times).choice.strategy == "silent"
    # A lost worker ends it unless it says otherwise; only who says so is free of the slowest.
    leaving = decided(times, gang_scheduled=False)
    assert leaving.choice.strategy == "free"
    assert dict(leaving.excluded)["silent"].endswith("the job stops when a worker is lost")
    (change,) = [c for c in decided(times).changes if c.startswith("Workers of unequal speed")]
    assert "free should be faster" in change
    assert get_traits("silent", {}, 1) == Traits()
    assert not any(
        (Traits().is_synchronous_on_one_worker, Traits().equals_ddp, Traits().shards_states)
    )


def test_the_plan_takes_a_new_strategys_ranks_for_no_two_counts_alike(registered):
    request = Request(
        settings("silent", options={}), (3, 32, 32), 10, workers_per_node=4, eval_batch=64
    )
    assert not request.is_worker_of_server
    assert not get_strategy_class("silent").alike_on_any_count


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_waits_for_the_slowest_and_survives_a_loss_as_it_says(name):
    """Four workers of which one takes 20 times as long: who waits takes as long as that one."""
    workers, plan = 4, TicketPlan(1, 12, 4 * parse_policy_options(name).pushes_per_ticket)

    def run(**how):
        policies = [make_policy(name, torch.zeros(2), hyper_of(name, lr=0.01, workers=workers))]
        timing = Timing(1.0, slowdown=(1.0, 1.0, 1.0, 20.0))
        return simulate(policies, plan, lambda t, p, w: torch.ones_like(w), timing, **how)

    said = get_traits(name, get_option_defaults(name), workers)
    trace = run()
    shares = trace.pushes[3] / sum(trace.pushes)
    assert said.waits_for_slowest == (shares > 0.15)
    if said.ends_with_a_worker:
        with pytest.raises(WorkerLost):
            run(changes=[(2.5, 1, "leave")])
    else:
        assert len(run(changes=[(2.5, 1, "leave")]).settled) == len(plan)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 4])
def test_a_policy_makes_as_many_updates_as_it_says(name, workers):
    plan = TicketPlan(1, 12, workers)
    policy = make_policy(name, torch.zeros(2), hyper_of(name, lr=0.01, workers=workers))
    simulate([policy], plan, lambda t, p, w: torch.ones_like(w), Timing(1.0, compute_spread=0.3))
    said = get_traits(name, get_option_defaults(name), workers).updates_per_step
    # A ticket of the plan is a batch of a worker, in as many pushes as the policy makes of it.
    assert said is None or policy.version == 12 * said


@pytest.mark.parametrize(
    ("name", "options", "gpus", "expected"),
    [
        ("ps-sync", {}, 4, {"equals_ddp": True, "ends_with_a_worker": True}),
        (
            "ps-sync",
            {"wire": "bfloat16"},
            4,
            {"equals_ddp": False, "is_synchronous_on_one_worker": False},
        ),
        ("ps-async", {}, 1, {"equals_ddp": True}),
        ("ps-async", {}, 2, {"equals_ddp": False, "is_synchronous_on_one_worker": True}),
        ("ps-async-modified", {}, 1, {"is_synchronous_on_one_worker": False, "equals_ddp": False}),
        ("ps-async-modified", {"pushes_per_batch": 1}, 1, {"is_synchronous_on_one_worker": True}),
        (
            "ps-kbatch",
            {"k": 2},
            1,
            {"is_synchronous_on_one_worker": False, "updates_per_step": 0.5},
        ),
        ("ps-backup", {"backups": 0}, 4, {"waits_for_slowest": True}),
        ("fsdp", {}, 2, {"shards_states": True, "equals_ddp": True, "ring_copies": 2}),
        ("fsdp", {"reshard_after_forward": "never"}, 2, {"ring_copies": 2}),
        ("fsdp", {"mixed_precision": "policy"}, 2, {"equals_ddp": False}),
        ("local-sgd", {"period": 4}, 2, {"equals_ddp": False, "ring_copies": 0.5}),
        ("local-sgd", {"start": 1}, 1, {"equals_ddp": True, "ring_copies": None}),
        (
            "diloco",
            {},
            1,
            {"is_synchronous_on_one_worker": False, "equals_ddp": False, "kept_copies": 2},
        ),
        ("diloco", {"outer_lr": 1.0, "outer_momentum": 0.0}, 1, {"equals_ddp": True}),
        ("gossip", {}, 1, {"equals_ddp": True, "ring_copies": 0}),
        ("gossip", {}, 2, {"equals_ddp": False, "ring_copies": 2}),
        ("gossip", {}, 4, {"equals_ddp": False, "ring_copies": 8 / 3}),
        ("fsdp", {}, 4, {"weight_parts": 4, "optimizer_parts": 4}),
        ("fsdp", {"shard_group_size": 2}, 4, {"weight_parts": 2, "optimizer_parts": 2}),
        ("fsdp", {"shard_group_size": 8}, 4, {"weight_parts": 4}),
        (
            "fsdp",
            {"shard_group_size": "node", "offload": "cpu"},
            4,
            {"weight_parts": None, "states_on_host": True},
        ),
        ("ddp", {"compress": "fp16"}, 2, {"equals_ddp": False, "ring_copies": 1}),
        (
            "ddp",
            {"compress": "powersgd"},
            1,
            {"equals_ddp": True, "is_synchronous_on_one_worker": True},
        ),
        ("zero1", {}, 4, {"weight_parts": 1, "optimizer_parts": 4, "shards_states": False}),
        ("zero1-torch", {}, 4, {"optimizer_parts": None, "ring_copies": 3}),
    ],
)
def test_traits_follow_options_and_the_number_of_workers(name, options, gpus, expected):
    said = asdict(get_traits(name, get_option_defaults(name) | options, gpus))
    assert {key: said[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "options", "gpus", "equals", "alone"),
    [
        ("single", {}, 1, True, True),
        ("ddp", {}, 4, True, True),
        ("ps-sync", {}, 4, True, True),
        ("tensor", {"tensor_parallel_size": 2}, 4, False, True),
        ("pipeline", {"microbatches": 4}, 4, True, False),
        ("pipeline", {"microbatches": 8}, 4, False, False),
        ("pipeline", {"microbatches": 8}, 1, False, False),
    ],
)
def test_a_loss_that_does_not_add_up_trains_alike_in_equal_parts_only(
    name, options, gpus, equals, alone
):
    given = (name, get_option_defaults(name) | options, gpus)
    said, usual = get_traits(*given, loss_adds_up=False), get_traits(*given)
    assert (said.equals_ddp, said.is_synchronous_on_one_worker) == (equals, alone)
    assert usual.equals_ddp


class Renamed(get_strategy_of_policy("ps-ssp")):
    """A policy's strategy under a name of its own."""


def test_a_policy_goes_by_its_own_name_and_not_by_the_strategys(monkeypatch):
    monkeypatch.setitem(REGISTRY, "my-servers", f"{__name__}:Renamed")
    given = get_option_defaults("my-servers") | {"staleness_bound": 5}
    s = settings("my-servers", options=given, gpus=2, per_worker_batch=8)
    [config] = make_server_configs(s, 64, RunFolder(Path()), None)
    assert config.policy == "ps-ssp"
    assert config.policy_options == {"staleness_bound": 5, "lr_scale": "1/N"}
    sizes = {"weights": 100, "buffers": 8}
    needs = [
        servers.predict_server_bytes_by_purpose(replace(s, strategy=name), sizes, 2)
        for name in ("my-servers", "ps-ssp")
    ]
    assert needs[0] == needs[1]


def test_the_record_and_the_columns_carry_every_trait():
    names = [trait.name for trait in fields(Traits)]
    said = json.loads(SCHEMA_PATH.read_text())["properties"]["strategy"]["properties"]["traits"]
    assert list(said["properties"]) == said["required"] == names
    assert set(names) <= set(columns.COLUMNS)


@pytest.mark.slow
def test_no_wing_keeps_a_list_of_strategies():
    """No text is a strategy's name, but in extensions that add some, or say how other engines call them."""
    names = {*REGISTRY, "ps-"}
    names_some = {name for name, each in load_extensions().items() if each.strategies} | {"emit"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}"
        for wing in (
            "train",
            "analysis",
            *(f"extensions/{n}" for n in load_extensions() if n not in names_some),
        )
        for path in sorted((PACKAGE / wing).rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in MAY_NAME
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found
