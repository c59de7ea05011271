"""Parameter-server runs whose processes are killed or stopped: real processes, real signals."""

from __future__ import annotations

import signal
import time

import pytest
from ps_harness import Habits, Processes, config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SLOWLY = Habits(step_s=0.02)
#: Within a second on a quiet machine; on any, long before a heartbeat is overdue (20 s).
AT_ONCE_S = 10.0


def begun(run: Processes, workers: range) -> set[int]:
    return {n["ticket"] for w in workers for n in run.notes(w) if "ticket" in n}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_async_goes_on_without_a_killed_worker_and_counts_every_ticket_once(tmp_path, transport):
    habits = [Habits(transport, 0.02)] * 3
    with Processes(tmp_path, config(tmp_path, steps_per_epoch=20, slices=3), habits) as run:
        run.wait_for_tickets(1, 4)
        run.signal(run.workers[1], signal.SIGKILL)
        assert [run.end(w)["end"] for w in (0, 2)] == ["done", "done"]
        stats = run.statistics()
    assert stats["status"] == "ok"
    assert stats["tickets_settled"] == 60
    assert set(stats["updates"]) == {60}  # every shard saw every ticket once, none twice
    assert [lost["worker"] for lost in stats["lost"]] == [1]
    assert sum(w["tickets"] for w in stats["workers"]) == 60
    assert {w["transport"] for w in stats["workers"]} == {transport}
    held = run.notes(1)[-1]["ticket"]
    assert [r["ticket"] for r in stats["reassigned"]] in ([held], [])  # [] if just settled


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_ticket_whose_holder_died_half_way_through_its_push_counts_once(
    tmp_path, transport, n_servers
):
    habits = [Habits(transport, 0.02), Habits(transport, 0.02, dies_at=3)]
    plan = config(tmp_path, steps_per_epoch=15, slices=2, n_servers=n_servers)
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
    habits = [SLOWLY, Habits(step_s=2.0)]
    with Processes(tmp_path, config(tmp_path, steps_per_epoch=4, slices=1), habits) as run:
        run.wait_for_tickets(1, 1)
        run.wait_for_tickets(0, 3)  # all others: worker 0 waits now, or soon
        time.sleep(0.3)
        assert run.notes(0)[-1].get("end") is None
        killed_at = run.signal(run.workers[1], signal.SIGKILL)
        end = run.end(0)
        stats = run.statistics()
    assert end["end"] == "done"
    assert end["at"] - killed_at < AT_ONCE_S
    assert stats["tickets_settled"] == 4
    assert [r["to"] for r in stats["reassigned"]] == [0]


@pytest.mark.parametrize("n_servers", [1, 2])
def test_sync_ends_for_all_at_a_kill_and_says_who_was_lost(tmp_path, n_servers):
    plan = config(tmp_path, steps_per_epoch=500, slices=3, policy="ps-sync", n_servers=n_servers)
    with Processes(tmp_path, plan, [SLOWLY] * 3) as run:
        run.wait_for_tickets(1, 5)
        killed_at = run.signal(run.workers[1], signal.SIGKILL)
        ends = [run.end(w) for w in (0, 2)]
        stats = run.statistics()
    for end in ends:
        assert end["end"] == "RunEnded"
        assert "worker 1 was lost" in end["reason"]
        assert end["reason"].startswith("step ")
        assert end["at"] - killed_at < AT_ONCE_S
    assert stats["status"] == "lost"
    assert "worker 1 was lost" in stats["error"]
    step = stats["lost"][0]["step"]
    assert stats["error"].startswith(f"step {step}: ")
    # Its last ticket may have reached it without its having noted it.
    assert step - run.notes(1)[-1]["ticket"] // 3 in (0, 1)


def test_a_stopped_worker_is_given_up_at_its_deadline_and_cannot_come_back(tmp_path):
    plan = config(tmp_path, steps_per_epoch=100, slices=2, heartbeat_deadline_s=1.0)
    with Processes(tmp_path, plan, [SLOWLY] * 2) as run:
        run.wait_for_tickets(1, 3)
        stopped_at = run.signal(run.workers[1], signal.SIGSTOP)
        time.sleep(2.0)
        run.signal(run.workers[1], signal.SIGCONT)
        end = run.end(1)
        assert run.end(0)["end"] == "done"
        stats = run.statistics()
    assert end["end"] == "RunEnded"
    assert "no heartbeat for 1 s" in end["reason"]
    assert end["at"] - stopped_at < 3.5
    assert [lost["reason"] for lost in stats["lost"]] == ["no heartbeat for 1 s"]
    assert stats["tickets_settled"] == 200
    assert set(stats["updates"]) == {200}


@pytest.mark.alone
@pytest.mark.parametrize("spin", [False, True])
def test_a_slow_worker_is_not_taken_for_dead(tmp_path, spin):
    slow = Habits(step_s=2.5, spin=spin)
    plan = config(tmp_path, steps_per_epoch=1, slices=2, heartbeat_deadline_s=1.0)
    with Processes(tmp_path, plan, [SLOWLY, slow]) as run:
        assert [run.end(w)["end"] for w in (0, 1)] == ["done", "done"]
        assert run.statistics()["lost"] == []


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_workers_end_when_their_server_is_killed(tmp_path, transport):
    habits = [Habits(transport, 0.02), Habits(transport, 3.0)]
    with Processes(tmp_path, config(tmp_path, steps_per_epoch=500, slices=2), habits) as run:
        run.wait_for_tickets(0, 3)
        run.wait_for_tickets(1, 1)
        killed_at = run.signal(run.servers[0], signal.SIGKILL)
        ends = [run.end(0), run.end(1)]
    for end in ends:
        assert end["end"] == "ServerLost"
        assert "server 0 was lost" in end["reason"]
    waiting, computing = ends
    assert waiting["at"] - killed_at < AT_ONCE_S
    assert computing["at"] - killed_at < 3.0 + AT_ONCE_S  # it finishes its step


def test_a_stopped_server_is_noticed_at_the_deadline(tmp_path):
    plan = config(tmp_path, steps_per_epoch=500, slices=2, heartbeat_deadline_s=1.0)
    with Processes(tmp_path, plan, [SLOWLY] * 2) as run:
        run.wait_for_tickets(1, 3)
        stopped_at = run.signal(run.servers[0], signal.SIGSTOP)
        ends = [run.end(w) for w in (0, 1)]
    for end in ends:
        assert end["end"] == "ServerLost"
        assert "nothing was heard for 1 s" in end["reason"]
        assert end["at"] - stopped_at < 3.5


def test_a_run_in_which_all_workers_are_killed_ends(tmp_path):
    with Processes(tmp_path, config(tmp_path, steps_per_epoch=500, slices=2), [SLOWLY] * 2) as run:
        for worker in (0, 1):
            run.wait_for_tickets(worker, 2)
        for worker in (0, 1):
            run.signal(run.workers[worker], signal.SIGKILL)
        stats = run.statistics(5.0)
    assert stats["status"] == "lost"
    assert stats["error"] == "all 2 workers were lost"
