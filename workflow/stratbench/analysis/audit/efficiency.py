"""Rules on operations and energy: no more than the devices can do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stratbench.analysis.audit.checks import Facts, unless
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import record_rule
from stratbench.analysis.audit.timelines import SAMPLES
from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.samples import WORKING_PCT
from stratbench.telemetry.flops import TRAINING_FLOPS
from stratbench.telemetry.machine.hardware import datasheet_of

#: More and less than any GPU draws while it trains, in watts. If a GPU states its
#: limit, that replaces the first.
MOST_W, LEAST_W = 2000.0, 5.0
#: The share by which a GPU may exceed its limit for moments.
OVERSHOOT = 0.1
#: The share by which energy may miss its GPUs' mean power times the training time, besides chance.
POWER = 0.1
#: The number of standard errors of a mean power that chance explains.
DEVIATIONS = 3.0
#: The time by which the power of an NVML sample is late, in s: it is averaged over about a second.
LATE_S = 1.0
#: The least that a working GPU draws, as a share of its limit: what an A100 of 400 W draws idle.
IDLE_POWER = 0.125
#: More operations per second than one core of a CPU can do.
CORE_FLOPS = 5e11

# What follows from what; the rules below say which holds when.
FLOPS = relations(
    f"compute.training_flops_per_sample == {TRAINING_FLOPS} * compute.forward_flops_per_sample "
    "if model.trainable_parameters == model.parameters",
    # Frozen parameters have no gradients, of which each takes as much as the forward.
    "compute.training_flops_per_sample >= compute.forward_flops_per_sample",
    f"compute.training_flops_per_sample <= {TRAINING_FLOPS} * compute.forward_flops_per_sample",
    "compute.achieved_flops_per_s == flops_per_sample * batch.samples_seen / time.train_time_s",
    "compute.mfu == compute.achieved_flops_per_s / compute.peak_flops_per_s",
    "compute.mfu <= 1",
    "compute.peak_flops_per_s == sum_of_datasheets",
    "compute.achieved_flops_per_s <= sum_of_datasheets",
    # A product uses every weight at least once, two operations each; biases and norms are few. A user's
    # network may have tables and what is never called.
    "compute.forward_flops_per_sample >= model.parameters if settings.own_model is None",
    "compute.achieved_flops_per_s <= flops_of_all_cores",
)
ENERGY = relations("energy.joules_per_sample == energy.train_joules / batch.samples_applied")
POWERS = relations(
    ("energy.train_joules <= power_limits_w * time.train_time_s", OVERSHOOT),
    f"energy.train_joules >= {LEAST_W} * times_of_workers_s",
)


@record_rule("contradictory-efficiency", "unusable", "time")
def contradictory_efficiency(facts: Facts) -> Iterator[str]:
    """Operations a second do not follow from samples and time, or exceed what the devices can do."""
    of_forward = facts("compute.forward_flops_per_sample")
    of_training = facts("compute.training_flops_per_sample")
    each = of_forward and TRAINING_FLOPS * of_forward if of_training is None else of_training
    precision, known, flops = facts("settings.precision"), None, None
    names = [value_at(worker["provenance"], "gpu.name") for worker in facts.workers]
    if facts.whole and None not in names and precision not in (None, "fp64"):
        peaks = [peak and peak.tflops(precision) for peak in map(datasheet_of, names)]
        known = 1e12 * sum(peaks) if None not in peaks else None
    if facts("provenance.device") == "cpu" and facts.workers:
        cores = max(
            value_at(worker["provenance"], "host.cores_logical") or 0 for worker in facts.workers
        )
        hosts = max(1, facts("provenance.nodes") or 1)
        flops = cores * hosts * CORE_FLOPS or None
    yield from unless_hold(
        facts, FLOPS, flops_per_sample=each, sum_of_datasheets=known, flops_of_all_cores=flops
    )


@record_rule("contradictory-energy", "unusable", "time")
def contradictory_energy(facts: Facts) -> Iterator[str]:
    """Energy does not follow from itself, or is not what GPUs can have drawn in this time."""
    joules, time_s = facts("energy.train_joules"), facts("time.train_time_s")
    if joules is None:
        return
    yield from unless_hold(facts, ENERGY)
    if facts("provenance.device") == "cpu":
        yield f"energy.train_joules is {joules:.6g}, although the workers had no GPUs"
    elif time_s:
        limits = [value_at(w["provenance"], "gpu.power_limit_w") or MOST_W for w in facts.workers]
        times = [w["train_time_s"] for w in facts.workers if w["train_time_s"]]
        named = {"power_limits_w": sum(limits), "times_of_workers_s": sum(times)}
        yield from unless_hold(facts, POWERS, **named)
        yield from faults_of_power(facts, joules)


def faults_of_power(facts: Facts, joules: float) -> Iterator[str]:
    """Checks energy against the sampled power of the GPUs, and against what working GPUs draw at least."""
    drawn_j = slack_j = least_j = 0.0
    sampled = 0
    for worker in facts.workers:
        one, time_s = facts.gpu_series(worker), worker["train_time_s"] or 0.0
        used, power = (
            one.training.get(name) if one else None for name in ("gpu_util_pct", "power_w")
        )
        if used and used.count >= SAMPLES and used.mean > WORKING_PCT:
            limit_w = value_at(worker["provenance"], "gpu.power_limit_w") or 0.0
            least_j += IDLE_POWER * limit_w * time_s
        if power and power.count >= SAMPLES:
            sampled += 1
            drawn_j += power.mean * time_s
            late_j = LATE_S * len(facts("time.epoch_times_s")) * (power.most - power.least)
            slack_j += late_j + DEVIATIONS * power.std / math.sqrt(power.count) * time_s
    what = "energy.train_joules"
    yield from unless(
        what, joules, ">=", f"{IDLE_POWER:.1%} of the power limit of GPUs that worked", least_j
    )
    if sampled == facts.gpus:
        formula = "the mean power in the timeline x time"
        yield from unless(what, joules, "==", formula, drawn_j, POWER, slack_j)
