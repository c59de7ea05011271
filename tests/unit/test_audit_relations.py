"""The audit's relations: each of their sides, disturbed in an honest record, is found by its rule.

The faults are made from the relations themselves, so that a new one is tested as soon as it stands there.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from typing import Any

import pytest
from planted import by_command, put, sound, started_again
from test_audit_bounds import SLOWED, slowed
from test_audit_faults import (
    ALONE,
    ASYNC,
    DDP,
    DIVERGED,
    FSDP,
    NO_CELLS,
    SINGLE,
    SYNC,
    TIMEOUT,
)  # fmt: skip

from stratbench.analysis.audit import KINDS, rules_of
from stratbench.analysis.audit.checks import Facts
from stratbench.analysis.audit.relations import Relation, relations, unless_hold
from stratbench.analysis.audit.rule import Evidence, record_rule
from stratbench.telemetry.machine.hardware import datasheet_of

Record = dict[str, Any]
SERVER, LINK = "server.servers.0", "server.servers.0.workers.1"

#: The modules of relations, and these with the module's name.
MODULES = {kind.__name__.rsplit(".", 1)[1]: kind for kind in KINDS}
RELATIONS = [
    (name, relation)
    for name, kind in MODULES.items()
    for value in vars(kind).values()
    for relation in (value if isinstance(value, tuple) else ())
    if isinstance(relation, Relation)
]


def for_steps(record: Record) -> None:
    """A cell that trained a number of steps, and was not evaluated."""
    record["settings"] |= {"steps": 6 * record["batch"]["steps_per_epoch"]}
    record["score"] |= {"per_epoch": [], "final": None, "best": None}
    record["time"]["eval_s"] = 1e-9


def by_command_for_steps(record: Record) -> None:
    """A command that trained a number of steps."""
    by_command(record)
    for_steps(record)


def stopped_late(record: Record) -> None:
    """A cell that was stopped after some epochs."""
    record["score"] |= {"per_epoch": copy.deepcopy(sound("cuda")[DDP]["score"]["per_epoch"][:2])}
    record["score"]["best"] = max(entry["score"] for entry in record["score"]["per_epoch"])


def slowed_down(record: Record) -> None:
    """A cell with a slowed worker, whose steps are not longer for it."""
    slowed(SLOWED, 4.1)(record)
    record["time"]["breakdown_ms"]["forward"] -= 4.1


def on_known_gpus(record: Record) -> None:
    """A cell on GPUs with a datasheet, whose NVML tells all that it can."""
    peak = datasheet_of(KNOWN_GPU).tflops("fp32") * 1e12
    for worker in record["workers"]:
        worker["provenance"]["gpu"]["name"] = KNOWN_GPU
        own = worker["memory"]
        own |= {"idle_bytes": own["base_bytes"], "nvml_process_used_bytes": own["nvml_used_bytes"]}
    compute = record["compute"]
    compute["peak_flops_per_s"] = len(record["workers"]) * peak
    compute["mfu"] = compute["achieved_flops_per_s"] / compute["peak_flops_per_s"]


def elastic(**changed: Any) -> Callable[[Record], None]:
    """A change to a cell whose two workers were jobs of their own; its training was gone on with."""

    def change(record: Record) -> None:
        record["settings"]["elastic"] = True
        record["strategy"]["traits"]["ends_with_a_worker"] = False
        dates = {"joined_s": 14.5, "first_step_s": 15.0, "allocated_s": 61.0, "reason": "COMPLETED"}
        jobs = [
            {"number": n, "slot": n, "id": str(n), "submitted_s": 10.5, "started_s": 11.0 + n}
            | {"ended_s": 72.0 + n, **dates}
            for n in range(2)
        ]
        record["elastic"] = {
            "lives": 2, "queue_wait_s": 0.5, "first_step_s": 15.0, "allocated_s": 122.0, "idle_s": 24.0,
            "joins": 2, "leaves": 0, "losses": 0, "restarts": 1, "steps_repeated": 10,
            "pauses": {"count": 0, "median_s": None, "longest_s": None, "total_s": 0.0},
            "checkpoints": {"count": 9, "held_up_s": 0.1}, "jobs": jobs, "generations": [],
        } | copy.deepcopy(changed)  # fmt: skip
        record["communication"] = record["energy"] = None

    return change


def generation(
    life: int, steps: tuple[int, int], dates: tuple[float, float], **more: Any
) -> Record:
    own = {
        "life": life,
        "number": 0,
        "members": [0, 1],
        "cause": "",
        "broken": False,
        "pause_s": None,
    }
    own |= {"from_step": steps[0], "to_step": steps[1], "began_s": dates[0], "ended_s": dates[1]}
    return own | {"from_checkpoint": life > 0} | more


#: Synchronous workers: all stop for a change, and later go on from a checkpoint.
SPLIT = elastic(
    generations=[
        generation(0, (0, 1000), (15.0, 35.0)),
        generation(0, (1000, 1200), (37.0, 41.0), number=1, pause_s=1.5),
        generation(1, (1190, 2340), (45.0, 70.0)),
    ],
    pauses={"count": 1, "median_s": 1.5, "longest_s": 1.5, "total_s": 1.5},
)


def served_elastic(record: Record) -> None:
    """Servers that were started again twice; forty tickets were done twice."""
    lives = [(1, 0.2, 0, 0), (2, 30.0, 2000, 10), (3, 40.0, 1990, 30)]
    keys = ("life", "began_s", "tickets_before", "tickets_done_twice")
    of_servers = {
        "tickets_done_twice": 40, "tickets_handed_on": 0, "returns": 2, "evaluations": 6,
        "last_epoch": None, "most_at_a_time": 2,
        "lives": [dict(zip(keys, life, strict=True)) for life in lives],
    }  # fmt: skip
    elastic(servers=of_servers, steps_repeated=20, lives=3, restarts=2)(record)
    (server,) = record["server"]["servers"]
    server["elastic"] = {"settled_before": 1990, "after_the_end": 0}
    for link in server["workers"]:
        link["tickets"] = 1345


def with_bubble(record: Record) -> None:
    """Workers that wait for other stages in a tenth of their forward pass."""
    phases = record["time"]["breakdown_ms"]
    phases["bubble"] = 0.1 * phases["forward"]
    phases["forward"] -= phases["bubble"]
    record["time"]["bubble_share"] = phases["bubble"] / sum(phases.values())


def with_own_times(record: Record) -> None:
    """Its workers' own times of three steps."""
    for worker in record["workers"]:
        worker["own_ms"] = [record["time"]["step_ms"]["min"] / k for k in (2, 3, 4)]


def with_issue_times(record: Record) -> None:
    """Its workers' times to issue a step."""
    for worker in record["workers"]:
        worker["issue_ms"] = 0.5 * record["time"]["step_ms"]["min"]


KNOWN_GPU = "NVIDIA A100-SXM4-40GB"


def honest() -> dict[str, Record]:
    """Records of many kinds in which no rule of one record finds a fault."""
    on_gpus = (DDP, FSDP, SINGLE, ASYNC, SYNC, ALONE, TIMEOUT, DIVERGED)
    rate = sound("cuda")[ASYNC]["settings"]["lr"]
    found = {f"cuda {place}": sound("cuda")[place] for place in on_gpus}
    found |= {f"cpu {place}": sound("cpu")[place] for place in (DDP, ASYNC)}
    for name, base, change in (
        ("steps", DDP, for_steps),
        ("diverged in steps", DIVERGED, for_steps),
        ("stopped", TIMEOUT, stopped_late),
        ("slowed", DDP, slowed_down),
        ("own times", DDP, with_own_times),
        ("issue times", DDP, with_issue_times),
        ("waits of stages", DDP, with_bubble),
        ("asked for", DDP, put("settings.device", "cuda")),
        ("skipped", ASYNC, put(f"{LINK}.skips", 0)),
        ("rate of a push", ASYNC, put("strategy.details.push_lr", rate)),
        ("known GPUs", DDP, on_known_gpus),
        ("command", DDP, by_command),
        ("command in steps", DDP, by_command_for_steps),
        ("started again", DDP, started_again),
        ("split", DDP, SPLIT),
        ("served by three lives", ASYNC, served_elastic),
    ):
        found[name] = copy.deepcopy(sound("cuda")[base])
        change(found[name])
    return found


HONEST = honest()


def figures_of(module: str, record: Record) -> list[str]:
    """What the rules of a module say of a record."""
    evidence = Evidence(NO_CELLS, [record])
    checks = [
        rule for rule in rules_of(MODULES[module]) if rule.id.startswith(("contra", "unlike"))
    ]
    return [found.figures for rule in checks for found in rule.check(evidence)]


#: Where that stands in a record which rules name in their relations, and what their names are made of.
PLACES = {
    "worst_rank": "workers.0", "ms": "time.step_ms", "link": LINK,
    "last_epoch": "score.per_epoch", "epoch": "score.per_epoch", "best_of_epochs": "score.per_epoch.0.score",
    "kind_of_device": "workers.1.provenance.device", "steps": "batch.steps_per_epoch",
    "steps_run": "batch.steps_per_epoch", "passes_run": "time.epoch_times_s",
    "samples_of_workers": "workers.1.samples", "hosts_of_workers": "workers.1.provenance.host.name",
    "slowest_worker_s": "workers.0.train_time_s", "slowest_server_s": f"{SERVER}.train_time_s",
    "sum_of_breakdown_ms": "time.breakdown_ms.forward", "mean_step_of_workers_ms": "workers.1.train_time_s",
    "slept_ms": "strategy.details.slowdown.step_without_ms",
    "from_started_to_finished_s": "provenance.started",
    "threads_of_a_worker": "workers.1.provenance.host.threads",
    "most_of_workers": "workers.0.memory.peak_bytes",
    "its_place": f"{SERVER}.server", "sum_of_tickets": f"{LINK}.tickets", "tickets": f"{LINK}.tickets",
    "elements_of_shards": f"{SERVER}.shard_numel",
    "pushes": f"{SERVER}.staleness.0.0", "updates": f"{SERVER}.updates.0", "dropped": f"{SERVER}.dropped.0",
}  # fmt: skip
#: Others are found in time and space beside the record, or said by a strategy's class.
ELSEWHERE = {
    "all_elements_but_one_shards", "asked_sigma", "bytes_of_busiest_server", "counted_epochs",
    "dtype_by_precision", "end_s", "epochs_asked_for", "epochs_of_server",
    "flops_of_all_cores",
    "flops_per_sample",
    "highest_staleness", "last_end_s", "lr_factor", "mean_pushes_of_a_shard", "most_steps_of_a_worker",
    "most_updates_of_a_shard", "n", "policy_of_strategy", "power_limits_w", "registered_kind",
    "registered_method", "sum_of_datasheets", "sum_of_staleness", "times_of_workers_s",
    "train_time_s_of_worker",
    # Of workers that come and go: counts, and sums over who was where.
    "between_s", "from_checkpoints", "inside_s", "joined", "len_lives", "pauses", "steps_of_generations",
    "steps_taken",
}  # fmt: skip
#: What weighs too little in a relation to break it: the longest of all steps, the last of many groups,
#: one more of a few times.
TOO_LITTLE = {
    ("ms.mean <= ", "ms.max"),
    ("model.parameters <= ", "strategy.wrap_groups.parameters"),
    ("len(worker.own_ms) <= ", "worker.own_ms"),
    ("worker.issue_ms / 1e3 * len(time.epoch_times_s) <= ", "time.epoch_times_s"),
}


def names(text: str) -> list[str]:
    """The paths and names of a formula."""
    tree = ast.parse(text, mode="eval")
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    inner |= {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return [ast.unparse(node) for node in nodes if id(node) not in inner]


def places(name: str, record: Record) -> Iterator[list[Any]]:
    """Where a figure stands in a record; of a list its last entry."""
    first, *rest = name.split(".")
    starts = {
        "server": [SERVER, first],
        "score": ["score.per_epoch.1", first],
        "worker": ["workers.1", "workers.0"],
        "skips": [f"{LINK}.skips", "strategy.details.skipped_steps"],
        "job": ["elastic.jobs.1"],
        "first_step_s": ["elastic.jobs.0.first_step_s"],
        "earlier": ["elastic.servers.lives.1"],
        "later": ["elastic.servers.lives.2", "elastic.generations.1"],
        "done_twice": ["elastic.servers.lives.2.tickets_done_twice"],
        "after_the_end": [f"{SERVER}.elastic.after_the_end"],
    }
    for start in starts.get(first, [PLACES.get(first, first)]):
        place: list[Any] = []
        value: Any = record
        for key in (*start.split("."), *rest):
            if isinstance(value, list) and not key.isdigit():
                if not value:
                    break
                place.append(len(value) - 1)
                value = value[-1]
            at = int(key) if key.isdigit() else key
            has = at < len(value) if isinstance(value, list) else at in (value or ())
            if not has or value[at] is None:
                break
            place.append(at)
            value = value[at]
        else:
            yield place


def others(value: Any) -> list[Any]:
    """Values that are far from one."""
    if isinstance(value, str):
        return ["another", "cpu", "fsdp", "2026-01-01T00:00:00+00:00"]
    if isinstance(value, dict):
        return [value | {"another": 1}]
    if isinstance(value, list):
        changed = [[other, *value[1:]] for other in others(value[0])] if value else [[{}]]
        return [*changed, value + value[:1]]
    changed = [value * factor + 1 for factor in (3, 1 / 3, 1e7, 1e-7, -1)]
    return [type(value)(other) for other in (*changed, value + 10**7, 0)]


def is_found(module: str, relation: Relation, name: str) -> bool:
    """Whether a fault in a figure of a relation is found by it in any honest record."""
    left, _, right = relation.sides
    of_commands = module == "commands"  # which no other rule judges by these
    for record in sorted(
        HONEST.values(), key=lambda r: (r["strategy"]["kind"] == "own") != of_commands
    ):
        for *inner, last in places(name, record):
            for other in others(reduce(getitem, [*inner, last], record)):
                changed = copy.deepcopy(record)
                reduce(getitem, inner, changed)[last] = other
                said = figures_of(module, changed)
                if any(f"{left} is " in f and f" {right}" in f for f in said):
                    return True
    return False


@pytest.mark.parametrize("name", HONEST)
def test_nothing_is_found_in_what_the_faults_are_planted_in(name):
    found = {module: figures_of(module, HONEST[name]) for module in MODULES}
    assert {module: figures for module, figures in found.items() if figures} == {}


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted({module for module, _ in RELATIONS}))
def test_a_fault_in_each_figure_of_each_relation_is_found_by_it(module):
    missed = [
        (relation.text, name)
        for where, relation in RELATIONS
        for side in (relation.sides[0], relation.sides[2])
        for name in names(side)
        if where == module
        and name not in ELSEWHERE
        and (f"{relation.sides[0]} {relation.sides[1]} ", name) not in TOO_LITTLE
        and not is_found(module, relation, name)
    ]
    assert missed == []


ROWS = relations(
    "time.total_s == 2 * time.train_time_s",
    ("time.total_s <= time.train_time_s", 0.1),
    ("sum(time.epoch_times_s) >= bound", 0.0, "len(time.epoch_times_s)"),
)


@pytest.mark.parametrize(
    ("total_s", "train_s", "spans", "bound", "said"),
    [
        (4.0, 2.0, [1.0, 1.0], 4, ["rank 1: time.total_s is 4, more than time.train_time_s, 2"]),
        (2.2, 2.0, [], None, ["rank 1: time.total_s is 2.2, but 2 * time.train_time_s is 4"]),
        (None, 2.0, [1.0], 2, []),
        (1.0, None, [1.0, None], 9, []),
        (0.0, 0.0, [1.0], 2.5, ["rank 1: sum(time.epoch_times_s) is 1, less than bound, 2.5"]),
        (float("nan"), 2.0, [9.0], 1, [
            "rank 1: time.total_s is nan, but 2 * time.train_time_s is 4",
            "rank 1: time.total_s is nan, more than time.train_time_s, 2",
        ]),
    ],
)  # fmt: skip
def test_a_relation_tells_both_sides_or_is_not_judged(total_s, train_s, spans, bound, said):
    record = copy.deepcopy(sound("cuda")[DDP])
    record["time"] |= {"total_s": total_s, "train_time_s": train_s, "epoch_times_s": spans}
    assert list(unless_hold(Facts(record), ROWS, "rank 1", bound=bound)) == said


CONDITIONAL = relations(
    "time.total_s == 1 if status == 'ok'",
    "time.total_s == 2 if status != 'ok' or not bound",
    "time.total_s == 3 if memory.unheard_of is None and bound > 2",
    ("time.total_s == 4 if memory.unheard_of is not None", 0.1),
)


@pytest.mark.parametrize(("bound", "judged"), [(9, [1, 3]), (1, [1]), (0, [1, 2]), (None, [1, 2])])
def test_a_relation_is_judged_where_its_condition_holds_and_what_is_absent_is_none(bound, judged):
    record = copy.deepcopy(sound("cuda")[DDP])
    record["time"]["total_s"] = 0.0
    rows = CONDITIONAL if bound is not None else CONDITIONAL[:2]
    said = list(unless_hold(Facts(record), rows, bound=bound))
    assert said == [f"time.total_s is 0, but {n} is {n}" for n in judged]


def test_a_rule_without_an_explanation_is_refused():
    with pytest.raises(TypeError, match="silent: a rule needs a docstring"):
        record_rule("silent", "note", "all")(lambda facts: iter(()))


def test_an_elastic_worker_that_came_too_late_for_a_batch_may_have_waited():
    record = copy.deepcopy(HONEST["served by three lives"])
    record["workers"][0]["train_time_s"] = 0.0
    link = record["server"]["servers"][0]["workers"][0]
    assert link["worker"] == record["workers"][0]["rank"]
    assert not [text for text in figures_of("servers", record) if "wait_s" in text]
