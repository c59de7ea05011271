"""What a difference between strategies could come from instead: the hour, or the host.

Constructed studies with a fault in when or where their cells ran, and honest ones beside them.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import fixture_records as fixture
import pandas as pd
import pytest
from planted import faster

from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.coordinates import Cell
from stratbench.extensions.audit.audit import RULES
from stratbench.extensions.audit.rule import AuditData
from stratbench.study.order import compute_job_priority

Record = dict[str, Any]
OURS = {"slow-host", "confounded-order", "not-in-turns", "confounded-host", "times-follow-time"}
STRATEGIES = ("ddp", "fsdp", "ps-async", "ps-dana", "ps-sync")
BEGIN = datetime(2000, 1, 1, tzinfo=UTC)


@cache
def base(cell: Cell) -> Record:
    """A record without noise in its training time."""
    record = fixture.make_record(cell)
    faster(record["time"]["train_time_s"] / 600)(record)
    return record


def study(
    order: Sequence[Cell],
    slow: Callable[[int, Cell], float] = lambda place, cell: 1.0,
    host: Callable[[int, Cell], str] = lambda place, cell: "constructed-host",
    at_once: int = 1,
    noise: float = 0.01,
) -> AuditData:
    """Cells that ran in this `order`, `at_once` at a time; `slow` multiplies the time of one."""
    rng = random.Random(str(order[:2]))
    records = []
    for place, cell in enumerate(order):
        record = copy.deepcopy(base(cell))
        faster(1 / (slow(place, cell) * math.exp(rng.gauss(0, noise))))(record)
        begun = BEGIN + timedelta(hours=place // at_once)
        record["provenance"] |= {
            "started": begun.isoformat(),
            "finished": (begun + timedelta(minutes=50)).isoformat(),
        }
        for worker in record["workers"]:
            worker["provenance"]["host"]["name"] = host(place, cell)
        records.append(record)
    return AuditData(pd.DataFrame(columns=list(COLUMNS)), records)


def findings(evidence: AuditData) -> dict[str, set[str]]:
    """The strategies found, by rule; a whole experiment is an empty name."""
    return {
        rule.id: {found.coordinates.get("strategy", "") for found in rule.check(evidence)}
        for rule in RULES
        if rule.id in OURS and any(rule.check(evidence))
    }


def cells(repeats: int = 3, strategies: Iterable[str] = STRATEGIES, gpus=(2,)) -> list[Cell]:
    return fixture.expand(tuple(strategies), ("resnet50",), gpus, repeats=repeats)


def in_turns(found: Sequence[Cell]) -> list[Cell]:
    return sorted(found, key=compute_job_priority, reverse=True)


def by_strategy(found: Sequence[Cell]) -> list[Cell]:
    return sorted(found)


def slower_by_10_percent(of: int) -> Callable[[int, Cell], float]:
    return lambda place, cell: 1.1 ** (place / (of - 1))


# ---- planted


@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
@pytest.mark.parametrize("strategies", [2, 3, 5])
def test_a_queue_that_ran_strategy_by_strategy_is_doubted(repeats, strategies):
    order = by_strategy(cells(repeats, STRATEGIES[:strategies]))
    assert findings(study(order))["confounded-order"] == set(STRATEGIES[:strategies])


@pytest.mark.parametrize("repeats", [2, 3, 10])
def test_a_strategy_that_was_added_later_is_doubted_and_no_other(repeats):
    first = in_turns(cells(repeats, STRATEGIES[:-1]))
    order = first + in_turns(cells(repeats, STRATEGIES[-1:]))
    assert findings(study(order)) == {"confounded-order": {STRATEGIES[-1]}}
    (found,) = next(rule for rule in RULES if rule.id == "confounded-order").check(study(order))
    assert found.values_text.startswith("trained after ddp on 2, fsdp on 2, ")


def test_a_strategy_added_with_one_more_repeat_of_all_is_noted():
    """The others' last repeats ran beside it: where the machine changed, `times-follow-time` may tell."""
    first = in_turns(cells(3, STRATEGIES[:-1]))
    later = [c for c in cells(4) if c.repeat == 3 or c.strategy == STRATEGIES[-1]]
    assert findings(study(first + in_turns(later))) == {"not-in-turns": {STRATEGIES[-1]}}


@pytest.mark.parametrize("repeats", [3, 5, 10])
def test_a_machine_that_slows_is_found_although_strategies_take_turns(repeats):
    order = in_turns(cells(repeats))
    found = findings(study(order, slower_by_10_percent(len(order))))
    assert found == {"times-follow-time": {""}}


def test_a_slow_hour_is_found():
    order = in_turns(cells(10))
    middle = range(15, 30)
    found = findings(study(order, lambda place, cell: 1.12 if place in middle else 1.0))
    assert found == {"times-follow-time": {""}}


@pytest.mark.parametrize("repeats", [2, 3, 10])
@pytest.mark.parametrize("slow", [1.0, 1.06, 1.15])
def test_strategies_on_a_node_of_their_own_each_are_doubted(repeats, slow):
    order = in_turns(cells(repeats))
    evidence = study(
        order,
        lambda place, cell: slow if cell.strategy == "fsdp" else 1.0,
        lambda place, cell: f"node-of-{cell.strategy}",
    )
    assert findings(evidence)["confounded-host"] == set(STRATEGIES)


def test_one_strategy_on_a_node_of_its_own_is_doubted_and_no_other():
    order = in_turns(cells(3))
    evidence = study(
        order,
        lambda place, cell: 1.06 if cell.strategy == "ps-dana" else 1.0,
        lambda place, cell: "other" if cell.strategy == "ps-dana" else f"n{place % 2}",
    )
    assert findings(evidence) == {"confounded-host": {"ps-dana"}}


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_collectives_on_one_node_and_servers_on_another_are_doubted(repeats):
    evidence = study(in_turns(cells(repeats)), host=lambda place, cell: cell.strategy[:2])
    assert findings(study(in_turns(cells(repeats, STRATEGIES[:1])))) == {}
    assert findings(evidence) == {"confounded-host": set(STRATEGIES)}


def test_halves_of_the_strategies_that_ran_one_after_the_other_are_doubted():
    halves = in_turns(cells(3, STRATEGIES[:2])) + in_turns(cells(3, STRATEGIES[2:4]))
    assert findings(study(halves)) == {"confounded-order": set(STRATEGIES[:4])}


@pytest.mark.parametrize("slow", [1.05, 1.1])
def test_one_of_three_nodes_that_is_slower_is_named(slow):
    order = in_turns(cells(3, gpus=(1, 2)))
    evidence = study(
        order,
        lambda place, cell: slow if place % 3 == 1 else 1.0,
        lambda place, cell: f"n{place % 3}",
    )
    assert findings(evidence)["slow-host"] == {""}
    (found,) = next(rule for rule in RULES if rule.id == "slow-host").check(evidence)
    assert found.values_text.startswith("n1: +")


# ---- honest


@pytest.mark.parametrize("noise", [0.005, 0.03])
@pytest.mark.parametrize("seed", range(2))
def test_three_equal_nodes_are_believed_and_so_is_a_slower_kind_of_gpu(noise, seed):
    rng = random.Random(seed)
    order = in_turns(cells(3, gpus=(1, 2)))
    hosts = [f"n{rng.randrange(3)}" for _ in order]
    equal = study(order, host=lambda place, cell: hosts[place], noise=noise)
    assert "slow-host" not in findings(equal)
    for record, host in zip(equal.records, hosts, strict=True):
        faster(0.5 if host == "n1" else 1.0)(record)
    assert "slow-host" in findings(AuditData(equal.cells, equal.records))
    for record, host in zip(equal.records, hosts, strict=True):
        for worker in record["workers"]:
            worker["provenance"]["gpu"]["name"] = "Other" if host == "n1" else "One"
    assert "slow-host" not in findings(AuditData(equal.cells, equal.records))


@pytest.mark.parametrize("noise", [0.005, 0.03])
@pytest.mark.parametrize("repeats", [1, 2, 3, 5, 10])
def test_cells_in_the_workflows_order_are_believed(repeats, noise):
    for gpus in ((2,), (1, 2, 4)):
        assert findings(study(in_turns(cells(repeats, gpus=gpus)), noise=noise)) == {}


@pytest.mark.parametrize("repeats", [2, 3, 10])
def test_repeats_that_are_spread_over_nodes_are_believed_and_so_are_two_clusters(repeats):
    order = in_turns(cells(repeats))
    for host in (
        lambda place, cell: f"n{(cell.repeat + STRATEGIES.index(cell.strategy)) % 4}",
        lambda place, cell: f"cluster-{cell.repeat % 2}",
        lambda place, cell: f"{cell.strategy}-{cell.repeat}",  # a node for each cell
    ):
        assert findings(study(order, host=host)) == {}


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("repeats", [3, 5])
def test_cells_that_land_on_nodes_by_chance_are_believed(repeats, nodes):
    rng = random.Random(nodes)
    order = in_turns(fixture.expand(STRATEGIES, ("resnet50", "vgg16"), (2, 4), repeats=repeats))
    for _ in range(5):
        evidence = study(order, host=lambda place, cell: f"n{rng.randrange(nodes)}", at_once=nodes)
        assert findings(evidence) == {}


def test_two_clusters_that_train_a_model_each_are_believed():
    order = in_turns(fixture.expand(STRATEGIES, ("resnet50", "vgg16"), (2,), repeats=3))
    assert findings(study(order, host=lambda place, cell: cell.model)) == {}


def test_a_cluster_that_runs_cells_of_more_workers_elsewhere_is_believed():
    order = in_turns(cells(3, gpus=(1, 2, 4)))
    evidence = study(
        order, lambda place, cell: 4 / cell.gpus, lambda place, cell: f"{cell.gpus}-gpu-node"
    )
    assert findings(evidence) == {}


def test_cells_that_ran_at_the_same_time_are_believed_whatever_their_order():
    assert findings(study(by_strategy(cells(3)), at_once=15)) == {}


def test_a_repeat_that_is_added_later_is_compared_fairly():
    order = in_turns(cells(2)) + in_turns([c for c in cells(4) if c.repeat > 1])
    assert findings(study(order)) == {}


def test_one_cell_that_is_trained_again_is_believed():
    order = in_turns(cells(5))
    for again in order[:5]:
        moved = [cell for cell in order if cell != again] + [again]
        assert findings(study(moved)) == {}


def test_what_no_machine_explains_is_no_doubt():
    """Strategy by strategy and each on its node, but twice as slow."""
    order = by_strategy(cells(3, STRATEGIES[:2]))
    evidence = study(
        order,
        lambda place, cell: 2.0 if cell.strategy == "fsdp" else 1.0,
        lambda place, cell: cell.strategy,
    )
    assert findings(evidence) == {}


def test_records_without_times_or_hosts_are_not_judged():
    evidence = study(by_strategy(cells(3)))
    for record in evidence.records:
        record["provenance"].pop("started")
        for worker in record["workers"]:
            worker["provenance"] = {}
    assert findings(evidence) == {}


def backfilled(nodes: int, seed: int) -> list[Cell]:
    """Cells in the order in which a queue with backfill starts them.

    The first in the queue has the nodes that are free next; others go ahead where they do not delay it.
    """
    rng = random.Random(seed)
    waiting = in_turns(cells(3, gpus=(1, 2, 4)))
    running: list[tuple[int, int]] = []  # when it ends, and how many nodes it has
    minute, started = 0, []
    while waiting:
        running = sorted(job for job in running if job[0] > minute)
        free, due = nodes - sum(n for _, n in running), minute
        ahead = free
        for end, n in running:  # until the first one has its nodes
            if ahead < min(waiting[0].gpus, nodes):
                ahead, due = ahead + n, end
        for cell in list(waiting):
            needed, minutes = min(cell.gpus, nodes), rng.randrange(20, 60)
            if needed <= free and (cell is waiting[0] or minute + minutes <= due):
                waiting.remove(cell)
                free -= needed
                running.append((minute + minutes, needed))
                started.append(cell)
        minute += 1
    return started


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_queue_with_backfill_is_a_note_unless_the_machine_changed(nodes):
    for seed in range(7):
        order = backfilled(nodes, seed)
        assert set(findings(study(order))) <= {"not-in-turns"}
        slow = study(order, slower_by_10_percent(len(order)))
        assert "times-follow-time" in findings(slow)
        assert "not-in-turns" not in findings(slow)


def test_such_a_queue_lets_some_take_no_turns():
    assert any("not-in-turns" in findings(study(backfilled(3, seed))) for seed in range(7))
