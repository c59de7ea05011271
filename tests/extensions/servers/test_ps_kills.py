"""Parameter-server runs whose processes are killed or stopped: real processes, real signals."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ps_harness import DEADLINE_S, GATE, LATE, SILENT, Habits, Processes, config

from launching import until
from stratbench.cell.files import write_text_atomically
from stratbench.extensions.servers.ps.server_config import HEARTBEAT_DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SLOWLY = Habits(step_s=0.02)
ENDLESS = 1_000_000  # steps


def begun(run: Processes, workers: range) -> set[int]:
    return {n["ticket"] for w in workers for n in run.notes(w) if "ticket" in n}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_async_goes_on_without_a_killed_worker_and_counts_every_ticket_once(tmp_path, transport):
    other = Habits(transport, 0.02, lets_begin=(1, 4))
    habits = [other, Habits(transport, 0.02, stays_at=3), other]
    with Processes(
        tmp_path, config(tmp_path, steps_per_epoch=20, slices_per_step=3), habits
    ) as run:
        run.wait_for_tickets(1, 4)
        os.kill(run.workers[1].pid, signal.SIGKILL)
        assert [run.end(w)["end"] for w in (0, 2)] == ["done", "done"]
        stats = run.statistics()
    assert stats["status"] == "ok"
    assert stats["tickets_settled"] == 60
    assert set(stats["updates"]) == {60}  # every shard saw every ticket once, none twice
    assert [lost["worker"] for lost in stats["lost"]] == [1]
    assert sum(w["tickets"] for w in stats["workers"]) == 60
    assert {w["transport"] for w in stats["workers"]} == {transport}
    assert [r["ticket"] for r in stats["reassigned"]] == [run.notes(1)[-1]["ticket"]]


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_ticket_whose_holder_died_half_way_through_its_push_counts_once(
    tmp_path, transport, n_servers
):
    habits = [Habits(transport, 0.02, lets_begin=(1, 4)), Habits(transport, 0.02, dies_at=3)]
    plan = config(tmp_path, steps_per_epoch=15, slices_per_step=2, n_servers=n_servers)
    with Processes(tmp_path, plan, habits) as run:
        assert run.end(0)["end"] == "done"
        stats = run.statistics()
    held = run.notes(1)[-1]["ticket"]
    handed_on = [(r["ticket"], r["from"], r["to"]) for r in stats["reassigned"]]
    assert handed_on[0] == (held, 1, 0)
    # Server 0 of two had all its shards already, and had handed out the next ticket.
    assert len(handed_on) == n_servers
    assert held in begun(run, range(1))
    assert stats["tickets_settled"] == 30
    assert set(stats["updates"]) == {30}


def test_the_last_ticket_of_a_killed_worker_is_handed_to_one_that_was_idle(tmp_path):
    habits = [SLOWLY, Habits(stays_at=0)]
    with Processes(tmp_path, config(tmp_path, steps_per_epoch=4, slices_per_step=1), habits) as run:
        run.wait_for_tickets(1, 1)
        run.wait_for_tickets(0, 3)  # all others: worker 0 waits now, or soon
        time.sleep(0.3)
        assert run.notes(0)[-1].get("end") is None
        os.kill(run.workers[1].pid, signal.SIGKILL)
        end = run.end(0)
        stats = run.statistics()
    assert end["end"] == "done"
    assert stats["tickets_settled"] == 4
    assert [r["to"] for r in stats["reassigned"]] == [0]


@pytest.mark.parametrize("n_servers", [1, 2])
def test_sync_ends_for_all_at_a_kill_and_says_who_was_lost(tmp_path, n_servers):
    plan = config(
        tmp_path, steps_per_epoch=ENDLESS, slices_per_step=3, policy="ps-sync", n_servers=n_servers
    )
    with Processes(tmp_path, plan, [SLOWLY] * 3) as run:
        run.wait_for_tickets(1, 5)
        os.kill(run.workers[1].pid, signal.SIGKILL)
        ends = [run.end(w) for w in (0, 2)]
        stats = run.statistics()
    for end in ends:
        assert end["end"] == "RunEnded"
        assert "worker 1 was lost" in end["reason"]
        assert end["reason"].startswith("step ")
    assert stats["status"] == "lost"
    assert "worker 1 was lost" in stats["error"]
    step = stats["lost"][0]["step"]
    assert stats["error"].startswith(f"step {step}: ")
    # Its last ticket may have reached it without its having noted it.
    assert step - run.notes(1)[-1]["ticket"] // 3 in (0, 1)


def test_a_stopped_worker_is_given_up_at_its_deadline_and_cannot_come_back(tmp_path):
    plan = config(tmp_path, steps_per_epoch=100, slices_per_step=2)
    habits = [Habits(step_s=0.02, lets_begin=(1, 4)), Habits(stays_at=3)]
    with Processes(tmp_path, plan, habits) as run:
        run.wait_for_tickets(1, 4)
        held = run.notes(1)[-1]["ticket"]
        os.kill(run.workers[1].pid, signal.SIGSTOP)
        (tmp_path / f"{LATE}1").touch()
        until(lambda: held in begun(run, range(1)))
        os.kill(run.workers[1].pid, signal.SIGCONT)
        end = run.end(1)
        assert run.end(0)["end"] == "done"
        stats = run.statistics()
    assert end["end"] == "RunEnded"
    reason = f"no heartbeat for {DEADLINE_S:g} s"
    assert reason in end["reason"]
    assert [lost["reason"] for lost in stats["lost"]] == [reason]
    assert stats["tickets_settled"] == 200
    assert set(stats["updates"]) == {200}


@pytest.mark.parametrize("spin", [False, True])
def test_a_worker_that_computes_for_long_still_sends_heartbeats(tmp_path, spin):
    slow = Habits(beats=3, spin=spin)
    with Processes(
        tmp_path, config(tmp_path, steps_per_epoch=1, slices_per_step=2), [SLOWLY, slow]
    ) as run:
        assert [run.end(w)["end"] for w in (0, 1)] == ["done", "done"]
        assert run.statistics()["lost"] == []


def test_a_worker_whose_interpreter_lock_is_held_for_half_a_minute_is_not_given_up(tmp_path):
    """No heartbeat leaves it meanwhile. The deadline is the product's; the server's clock is put on."""
    plan = config(
        tmp_path, steps_per_epoch=4, slices_per_step=1, heartbeat_deadline_s=HEARTBEAT_DEADLINE_S
    )
    gate, silent = tmp_path / f"{GATE}1", tmp_path / f"{SILENT}1"
    os.mkfifo(gate)
    with Processes(tmp_path, plan, [Habits(lets_begin=(1, 1)), Habits(holds_lock=True)]) as run:
        run.wait_for_tickets(1, 1)
        write_text_atomically(tmp_path / f"{LATE}1", "30")
        several_periods_s = 3.0  # a heartbeat is due every second
        until(lambda: silent.exists() and float(silent.read_text() or 0) > 30 + several_periods_s)
        (tmp_path / f"{LATE}1").unlink()
        gate.write_bytes(b"!")
        assert [run.end(w)["end"] for w in (0, 1)] == ["done", "done"]
        assert run.statistics()["lost"] == []


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_workers_end_when_their_server_is_killed(tmp_path, transport):
    habits = [Habits(transport, 0.02), Habits(transport, 3.0)]
    with Processes(
        tmp_path, config(tmp_path, steps_per_epoch=ENDLESS, slices_per_step=2), habits
    ) as run:
        run.wait_for_tickets(0, 3)
        run.wait_for_tickets(1, 1)
        os.kill(run.servers[0].pid, signal.SIGKILL)
        ends = [run.end(0), run.end(1)]  # one waits, one finishes its step
    for end in ends:
        assert end["end"] == "ServerLost"
        assert "server 0 was lost" in end["reason"]


def test_a_stopped_server_is_noticed_at_the_deadline(tmp_path):
    plan = config(tmp_path, steps_per_epoch=ENDLESS, slices_per_step=2)
    with Processes(tmp_path, plan, [Habits(stays_at=2)] * 2) as run:
        for worker in (0, 1):
            run.wait_for_tickets(worker, 3)
        os.kill(run.servers[0].pid, signal.SIGSTOP)
        (tmp_path / LATE).touch()
        ends = [run.end(w) for w in (0, 1)]
    for end in ends:
        assert end["end"] == "ServerLost"
        assert f"the peer has sent nothing for {DEADLINE_S:g} s" in end["reason"]


def test_a_run_in_which_all_workers_are_killed_ends(tmp_path):
    plan = config(tmp_path, steps_per_epoch=ENDLESS, slices_per_step=2)
    with Processes(tmp_path, plan, [SLOWLY] * 2) as run:
        for worker in (0, 1):
            run.wait_for_tickets(worker, 2)
        for worker in (0, 1):
            os.kill(run.workers[worker].pid, signal.SIGKILL)
        stats = run.statistics()
    assert stats["status"] == "lost"
    assert stats["error"] == "all 2 workers were lost"
