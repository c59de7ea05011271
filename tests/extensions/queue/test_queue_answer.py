"""Gang or elastic: modes that meet the same queue, what breaks even, and what is said of it."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest

from stratbench.analysis.decision.constraints import Constraints
from stratbench.command import CommandError
from stratbench.extensions.queue import answer as answers
from stratbench.extensions.queue.answer import simulate_queue_and_answer
from stratbench.extensions.queue.background import make_poisson_arrivals
from stratbench.extensions.queue.break_even import (
    ASYNCHRONOUS,
    GANG,
    HALF,
    SYNCHRONOUS,
    ModeTimes,
    QueuedTraining,
    compute_jackknife_interval,
    make_poisson_queue,
    make_recorded_queue,
    name_asynchronous_mode,
    simulate_modes,
)
from stratbench.extensions.queue.evidence import QueueEvidence
from stratbench.extensions.queue.history import FIELDS
from stratbench.extensions.queue.request import QueueRequest
from stratbench.extensions.queue.simulator import Cluster, Rules
from stratbench.extensions.sets import from_set
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.schema import (
    check_config_block,
    check_extension_keys,
    collect_constraints,
)


def times(**hours):
    """Times by mode, `a1` for asynchronous workers at a worth of 1; each of 6 blocks of 2 moments."""
    drawn = np.random.default_rng(0).uniform(0.97, 1.03, (6, 2))
    names = {"gang": GANG, "half": HALF, "sync": SYNCHRONOUS}
    names |= {f"a{worth:g}": name_asynchronous_mode(worth) for worth in (1.0, 0.8, 0.6)}
    return ModeTimes(
        {names[key.replace("_", ".")]: value * drawn for key, value in hours.items()}, 0.6
    )


def told(found, margin=0.03, **request):
    asked = QueueRequest(num_gpus=16, training_hours=2.0, load=0.7, **request)
    return answers._AnswerText(asked, found, margin)


# ---- statistics


def test_the_jackknife_of_a_mean_is_students_interval_on_logarithms():
    values = np.exp([0.1, 0.3, 0.2, 0.4])
    found = compute_jackknife_interval(lambda kept: float(np.exp(np.log(values[kept]).mean())), 4)
    half = 3.182446 * np.log(values).std(ddof=1) / 2  # t, 3 degrees of freedom
    assert math.log(found.value) == pytest.approx(0.25)
    assert math.log(found.high / found.value) == pytest.approx(half)
    assert compute_jackknife_interval(lambda kept: 2.0, 1).low is None
    assert compute_jackknife_interval(lambda kept: math.inf, 5) == (math.inf, None, None)


def test_times_at_the_same_moments_cancel_what_they_share():
    ratio = times(gang=4.0, sync=3.0).compute_mode_time_ratio(SYNCHRONOUS, GANG)
    assert ratio == pytest.approx((0.75, 0.75, 0.75))


def test_the_worth_that_breaks_even_is_where_the_times_meet():
    found = times(gang=4.0, sync=2.2, a1=2.0, a0_8=2.5, a0_6=3.5)
    # Time is linear in 1 / worth: from 2.0 at 1 to 2.5 at 1.25.
    assert found.compute_break_even_efficiency(SYNCHRONOUS).value == pytest.approx(
        1 / (1 + 0.25 * 0.2 / 0.5)
    )
    assert found.compute_break_even_efficiency(GANG).value == 0.0
    assert times(gang=1.0, a1=2.0, a0_8=2.5).compute_break_even_efficiency(GANG).value == math.inf


# ---- modes


def test_in_an_empty_cluster_all_modes_take_their_own_time():
    queue = make_recorded_queue(4, 4, Rules(), make_poisson_arrivals(60, 0.01, 16, 1), 0.5, 2, 2)
    found = simulate_modes(queue, QueuedTraining(8, 1.0, speed_loss_per_worker=0.0))
    startup_h, overhead = 60 / 3600, 1 + 10 / 1800
    for mode, hours in (
        (GANG, overhead),
        (HALF, 2 * overhead),
        (SYNCHRONOUS, overhead),
        (name_asynchronous_mode(1.0), 1.0),
        (name_asynchronous_mode(0.8), 1 / 0.8),
    ):
        assert found.hours_by_mode[mode] == pytest.approx(np.full((2, 2), hours + startup_h))


def test_all_modes_of_a_moment_meet_the_same_queue():
    queue = make_poisson_queue(4, 4, Rules(), 0.8, 1.0, 2, 2)
    one = simulate_modes(queue, QueuedTraining(8, 1.0), modes=[GANG, SYNCHRONOUS])
    other = simulate_modes(queue, QueuedTraining(8, 1.0), modes=[SYNCHRONOUS])
    assert np.array_equal(one.hours_by_mode[SYNCHRONOUS], other.hours_by_mode[SYNCHRONOUS])


@pytest.mark.slow
def test_the_simulation_says_again_what_was_found_first():
    """Load 0.7, N = 16: .78 [.67, .88] and .77 [.66, .86] of a gang's 2.8 h."""
    found = simulate_modes(
        make_poisson_queue(8, 8, Rules(), 0.7, 2.0, 10, 6), QueuedTraining(16, 2.0)
    )
    assert found.compute_mean_hours(GANG).value == pytest.approx(2.8, abs=0.05)
    for mode, ratio in ((SYNCHRONOUS, 0.78), (name_asynchronous_mode(1.0), 0.77)):
        assert found.compute_mode_time_ratio(mode, GANG).value == pytest.approx(ratio, abs=0.01)
    assert found.compute_break_even_efficiency(SYNCHRONOUS).value == pytest.approx(0.99, abs=0.01)
    assert found.compute_break_even_efficiency(GANG).value == pytest.approx(0.76, abs=0.01)


# ---- the answer


ALIKE = {
    "gang": 4.0,
    "half": 5.0,
    "sync": 2.2,
    "a1": 2.1,
    "a0_8": 2.6,
    "a0_6": 3.4,
}


def test_split_synchronous_is_said_where_the_worth_is_below_what_breaks_even():
    found = told(times(**ALIKE), sample_efficiency=[0.8, 0.9])
    assert found.choice == SYNCHRONOUS
    assert found.make_headline().startswith(
        "With the queue: split synchronous takes 2.2 h from submission to"
    )
    assert "0.55 [0.55, 0.55] times as long as a gang takes (4" in found.make_headline()
    assert (
        "is 0.8 to 0.9, which is too little: synchronous workers are faster."
        in found.make_sentences()[1]
    )
    assert "(pause 60 s, state from the last checkpoint)" in found.make_sentences()[1]
    own = told(times(**ALIKE), pause_s=0.2, recovery="peer")
    assert (
        "split synchronous workers (pause 0.2 s, state from another worker)"
        in own.make_sentences()[1]
    )


def test_asynchronous_workers_are_named_only_where_even_their_low_end_wins():
    slow = ALIKE | {"sync": 3.0}
    assert told(times(**slow), sample_efficiency=[0.8, 1.0]).choice == ASYNCHRONOUS
    assert (
        "enough: asynchronous workers are faster."
        in told(times(**slow), sample_efficiency=[0.8, 1.0]).make_sentences()[1]
    )
    unknown = told(times(**slow))
    assert unknown.choice == SYNCHRONOUS
    assert "is not given, so that they are not recommended" in unknown.make_sentences()[1]
    open_ = told(times(**slow), sample_efficiency=[0.6, 0.9])
    assert open_.choice == SYNCHRONOUS
    assert "leaves open which are faster: measure it more precisely" in open_.make_sentences()[1]


def test_of_equals_the_simplest_is_named():
    near = ALIKE | {"half": 3.9, "sync": 3.95, "a1": 3.9}
    assert told(times(**near)).choice == GANG
    assert "as a gang takes" not in told(times(**near)).make_headline()
    assert told(times(**near), margin=0.0).choice == HALF


@pytest.mark.parametrize("load", [0.91, 0.95, 1.2])
def test_a_queue_that_is_not_steady_has_no_answer(load):
    found = simulate_queue_and_answer(
        QueueRequest(num_gpus=16, training_hours=2.0, load=load), 8, 0.03
    )
    assert found["mode"] is None
    assert f"At a load of {load:.2f} the queue is not steady" in found["refused"]
    assert found["headline"].startswith("With the queue: no answer.")
    assert "The simulation does not model fair-share" in found["lines"][-1]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(answers, "BLOCKS", 3)
    monkeypatch.setattr(answers, "MOMENTS", 1)


@pytest.mark.parametrize("how", [{}, {"preemptible": True, "slow_nodes": 0.1, "slow_factor": 3.0}])
def test_a_simulation_answers_with_time_interval_and_mode(few, capsys, how):
    queue = {"num_gpus": 8, "training_hours": 1.0, "load": 0.8, "nodes": 4} | how
    cluster = {"gpus_per_node": 4, "memory_margin": 0.1}
    given = collect_constraints(
        {"decide": check_config_block("decide", {"queue": queue}), "cluster": cluster}
    )
    found = QueueEvidence(Constraints.from_json(json.dumps(given))).build_separate_answer()
    assert "queue: simulated 3 of 3 submission times" in capsys.readouterr().err
    chosen = [a for a in found["modes"] if a["chosen"]]
    assert [a["mode"] for a in chosen] == [found["mode"]]
    assert chosen[0]["hours_low"] < chosen[0]["hours"] < chosen[0]["hours_high"]
    assert found["headline"].startswith(f"With the queue: {found['mode']} takes ")
    assert set(found["even"]) == {GANG, HALF, SYNCHRONOUS}
    assert any("preempted by all other jobs" in line for line in found["lines"]) == bool(how)
    assert (
        "3 submission times in synthetic queues of 4 nodes of 4 GPUs, with load 0.80"
        in "\n".join(found["lines"])
    )


def recorded(tmp_path, users=("ann", "bob"), load=0.6, jobs=400):
    """An accounting that the simulator itself has written: 4 nodes of 4 GPUs."""
    arrivals = make_poisson_arrivals(jobs, load, 16, seed=2)
    starts: dict[int, float] = {}
    sim = Cluster(4, 4, arrivals, Rules())
    start = sim._start_job

    def note(job, at):
        start(job, at)
        starts[arrivals.index(next(a for a in arrivals if a.submit_s == job.submit_s))] = (
            job.start_s
        )

    sim._start_job = note
    sim.simulate_until()
    lines = ["|".join(FIELDS)]

    def stamp(seconds):
        return datetime.fromtimestamp(1_800_000_000 + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")

    for i, a in enumerate(arrivals):
        begin_s = starts[i]
        times_ = [
            stamp(a.submit_s),
            stamp(a.submit_s),
            stamp(begin_s),
            stamp(begin_s + a.duration_s),
        ]
        tres = f"cpu=4,gres/gpu={a.gpus}"
        values = [str(i), users[i % len(users)], "gpu", *times_, "COMPLETED"]
        values += [str(int(a.requested_wall_time_s / 60)), "1", tres, tres, "SchedMain"]
        lines.append("|".join(values))
    path = tmp_path / "history.txt"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_history_gives_load_size_and_arrivals_and_the_simulator_knows_it_again(few, tmp_path):
    asked = QueueRequest(
        num_gpus=8, training_hours=1.0, history=recorded(tmp_path), reservations="one"
    )
    found = simulate_queue_and_answer(asked, 4, 0.03)
    assert found["mode"]
    said = "\n".join(found["lines"])
    assert "3 submission times in recorded queues of 4 nodes of 4 GPUs" in said
    assert "were in use on average, and at most 16." in said
    assert "1 GPUs: " in said
    waited = next(line for line in found["lines"] if line.startswith("The history's jobs waited"))
    theirs, ours = (
        float(w) for w in waited.replace("h.", "").split() if w.replace(".", "").isdigit()
    )
    assert ours == pytest.approx(theirs, rel=0.1)


def test_a_history_that_hides_others_or_does_not_do_is_refused(few, tmp_path):
    path = recorded(tmp_path, users=("ann",), jobs=60)
    alone = simulate_queue_and_answer(
        QueueRequest(num_gpus=8, training_hours=1.0, history=path), 4, 0.03
    )
    assert "jobs of a single user" in alone["refused"]
    path = recorded(tmp_path, jobs=60)
    with pytest.raises(
        ValueError, match="too short for a training of 100 h; give the accounting of 600 h or more"
    ):
        simulate_queue_and_answer(
            QueueRequest(num_gpus=8, training_hours=100.0, history=path), 4, 0.03
        )
    with pytest.raises(
        ValueError, match=r"num_gpus = 64: the history's jobs used at most 16 GPUs at once"
    ):
        simulate_queue_and_answer(
            QueueRequest(num_gpus=64, training_hours=1.0, history=path), 4, 0.03
        )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "give exactly one of the two"),
        ({"load": 0.5, "history": "x"}, "give exactly one of the two"),
        ({"load": 0.5, "partition": "gpu"}, "selects jobs of a history; give a history"),
        ({"load": 0.5, "sample_efficiency": [0.9, 0.8]}, "write the lower end first"),
        ({"load": 0.5, "num_gpus": 33}, "the cluster has 8 nodes of 4 GPUs"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(given, reason):
    block = check_config_block("decide", {"queue": {"num_gpus": 8, "training_hours": 1.0} | given})
    with pytest.raises(ConfigError) as error:
        check_extension_keys("decide", block, {"cluster": {"gpus_per_node": 4}})
    assert reason in str(error.value)


@pytest.mark.slow
def test_decide_prints_it_and_writes_it_for_the_report(few, tmp_path, capsys):
    asked = "decide={queue: {num_gpus: 8, training_hours: 1, load: 0.5, nodes: 4}}"
    assert from_set.decide_from_set("paper:v2", [asked], tmp_path / "out") == 0
    text = capsys.readouterr().out
    queue = json.loads((tmp_path / "out/answers.json").read_text())["further"]["queue"]
    assert queue["headline"] in " ".join(text.split())
    assert "  The simulation does not model fair-share" in text
    with pytest.raises(CommandError, match="give exactly one of the two"):
        from_set.decide_from_set(
            "paper:v2", ["decide={queue: {num_gpus: 8, training_hours: 1}}"], tmp_path / "out"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        # The interval of what breaks even ends below what was simulated, and so is not known.
        {"slow_nodes": 0.1, "slow_factor": 3.0, "sample_efficiency": [0.62, 0.62]},
        # The worth lies in the interval.
        {
            "slow_nodes": 0.1,
            "slow_factor": 1.5,
            "sample_efficiency": [0.9, 0.9],
            "recovery": "peer",
            "pause_s": 0.2,
        },
    ],
)
def test_a_worth_that_may_not_break_even_recommends_no_asynchronous_workers(more):
    request = QueueRequest(
        num_gpus=16, training_hours=2, load=0.7, nodes=8, reservations="one", **more
    )
    found = simulate_queue_and_answer(request, 8, 0.03)
    assert found["headline"].startswith("With the queue: split synchronous")
    assert "leaves open which are faster" in found["lines"][1]
