"""The audit's rules, as data: what is suspicious, from where on, how bad it is, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from stratbench.analysis.checks import (
    Found,
    Study,
    above,
    accuracy_below_floor,
    async_alone_unlike_sync,
    bandwidth_impossible,
    input_bound,
    memory_reduced_too_much,
    mixed,
    no_common_cell,
    processes_share_cores,
    repeats_uneven,
    same_value_twice,
    sharding_slow_alone,
    steps_uneven,
    superlinear,
    synthetic_unlike_real,
    unequal_samples,
    unequal_start,
    workers_are_processes,
)

#: `unusable`: draw no conclusion from it; `doubtful`: explain it first; `note`: know it.
SEVERITIES = ("unusable", "doubtful", "note")


@dataclass(frozen=True)
class Rule:
    """One suspicion. `affects` says which figures of the cells it casts doubt on."""

    id: str
    severity: Literal["unusable", "doubtful", "note"]
    affects: Literal["time", "memory", "accuracy", "all"]
    limit: float
    explanation: str
    check: Callable[[Study, float], Iterator[Found]]


RULES: tuple[Rule, ...] = (
    Rule(
        "sharding-slow-alone",
        "doubtful",
        "time",
        1.15,
        "With one worker there is nothing to communicate, so sharding cannot explain being slower "
        "than DDP. Look at precision, wrap groups and the optimizer.",
        sharding_slow_alone,
    ),
    Rule(
        "superlinear",
        "doubtful",
        "time",
        1.03,
        "N workers cannot do more than N times the work of one. Look at the baseline: a batch too "
        "large for one worker's cache or memory, other settings, or a busy machine.",
        superlinear,
    ),
    Rule(
        "memory-reduced-too-much",
        "doubtful",
        "memory",
        1.05,
        "Sharding over N workers divides memory by N at most. Something else differs.",
        memory_reduced_too_much,
    ),
    Rule(
        "bandwidth-impossible",
        "unusable",
        "all",
        1.0,
        "The parameters that this strategy has to move in this time exceed what hardware moves, so "
        "it did not move them at every step.",
        bandwidth_impossible,
    ),
    Rule(
        "accuracy-below-floor",
        "doubtful",
        "accuracy",
        1.0,
        "Working training of any of the models is more accurate on this data set. Look at the "
        "learning rate, BatchNorm statistics that never reach the evaluated model, summed gradients.",
        accuracy_below_floor,
    ),
    Rule(
        "async-alone-unlike-sync",
        "unusable",
        "accuracy",
        0.01,
        "With one worker nothing is ever stale: asynchronous training must equal synchronous "
        "training. The implementations differ in something else.",
        async_alone_unlike_sync,
    ),
    Rule(
        "same-value-twice",
        "unusable",
        "time",
        2,
        "Two measured times never agree to the last digit: one is a copy.",
        same_value_twice,
    ),
    Rule(
        "unequal-samples",
        "unusable",
        "all",
        1.005,
        "Strategies that saw different numbers of samples do not compare in time or accuracy.",
        unequal_samples,
    ),
    Rule(
        "unequal-start",
        "unusable",
        "accuracy",
        1,
        "The strategies of a repeat must start from the same weights.",
        unequal_start,
    ),
    Rule(
        "mixed-precision",
        "unusable",
        "all",
        1,
        "Cells of a comparison compute in different precisions.",
        mixed("compute_dtype"),
    ),
    Rule(
        "mixed-data",
        "unusable",
        "all",
        1,
        "Cells of a comparison were trained on different data.",
        mixed("data_sha256"),
    ),
    Rule(
        "mixed-devices",
        "unusable",
        "time",
        1,
        "Cells of a comparison ran on different devices.",
        mixed("device_name"),
    ),
    Rule(
        "mixed-hosts",
        "note",
        "time",
        1,
        "Cells of a comparison ran on different hosts, which may differ in more than their GPUs.",
        mixed("host"),
    ),
    Rule(
        "mixed-torch",
        "doubtful",
        "all",
        1,
        "Cells of a comparison ran with different versions of torch.",
        mixed("torch"),
    ),
    Rule(
        "mixed-drivers",
        "note",
        "time",
        1,
        "Cells of a comparison ran with different GPU drivers.",
        mixed("driver"),
    ),
    Rule(
        "mixed-revisions",
        "note",
        "all",
        1,
        "Cells of a comparison were trained by different revisions of the code.",
        mixed("revision"),
    ),
    Rule(
        "throttled",
        "doubtful",
        "time",
        0.01,
        "A GPU was slowed down by heat or by a lack of power in part of the samples.",
        above("throttled_share", "throttled in {:.0%} of the samples"),
    ),
    Rule(
        "busy-machine",
        "doubtful",
        "time",
        0.25,
        "Other processes used the machine when the cell started: it measures them too.",
        above("other_cpu_cores", "others used {:.2g} CPU cores"),
    ),
    Rule(
        "steps-uneven",
        "note",
        "time",
        2.0,
        "Some steps take much longer than most: a straggler, a busy machine, or waits at a server.",
        steps_uneven,
    ),
    Rule(
        "repeats-uneven",
        "doubtful",
        "time",
        0.10,
        "The repeats differ so much that small differences between strategies mean nothing.",
        repeats_uneven,
    ),
    Rule(
        "input-bound",
        "doubtful",
        "time",
        0.10,
        "The workers wait for data: the times say little about the strategy.",
        input_bound,
    ),
    Rule(
        "synthetic-unlike-real",
        "doubtful",
        "time",
        1.05,
        "Real data should train as fast as generated data; where not, reading it is measured.",
        synthetic_unlike_real,
    ),
    Rule(
        "no-common-cell",
        "unusable",
        "all",
        1,
        "Collective strategies and parameter servers never trained the same model on the same data, "
        "so these records cannot rank one against the other.",
        no_common_cell,
    ),
    Rule(
        "workers-are-processes",
        "note",
        "time",
        1,
        "Workers are CPU processes on shared cores: speedups, efficiencies and the cost of "
        "communication say nothing about GPUs.",
        workers_are_processes,
    ),
    Rule(
        "processes-share-cores",
        "doubtful",
        "time",
        1.0,
        "There are more workers than cores: they take turns, and more workers bring no speed.",
        processes_share_cores,
    ),
)
