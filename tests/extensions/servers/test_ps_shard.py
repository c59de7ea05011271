"""A shard's bookkeeping, the buffers' mean, and snapshots that keep up with the weights."""

from __future__ import annotations

import threading

import pytest
import torch
from policy_reference import hyper_of

from launching import LIMIT_S
from stratbench.extensions.servers.policies.policies import make_policy
from stratbench.extensions.servers.policies.policy import Hyper
from stratbench.extensions.servers.ps.buffers import BufferMean
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.ps.snapshots import (
    SnapshotWriter,
    delete_snapshot,
    load_snapshot,
)

ALIVE, DEAD = (lambda: True), (lambda: False)


def make_shard(policy="ps-async", workers=2, weights=None, **options):
    released = []
    weights = torch.zeros(4) if weights is None else weights
    hyper = hyper_of(policy, lr=1.0, momentum=0.0, workers=workers)
    shard = Shard(
        5, make_policy(policy, weights, hyper, options), lambda *release: released.append(release)
    )
    return shard, weights, released


def test_a_ticket_counts_once_but_every_pusher_is_answered():
    shard, weights, released = make_shard()
    shard.push(0, 7, torch.ones(4), ALIVE)
    shard.push(1, 7, torch.ones(4), ALIVE)
    assert weights.tolist() == [-1.0] * 4
    assert released == [(0, 5), (1, 5)]


def test_a_push_of_a_worker_given_up_changes_nothing():
    shard, weights, released = make_shard()
    shard.push(0, 7, torch.ones(4), DEAD)
    assert weights.sum() == 0
    assert released == []
    shard.push(1, 7, torch.ones(4), ALIVE)  # whoever is handed the ticket may still push it
    assert weights.tolist() == [-1.0] * 4


def test_the_schedule_goes_by_the_pushes_of_global_batches():
    """Two pushes per batch; a ticket that comes twice counts once, and a skipped step counts."""
    config = ServerConfig(
        "", workers=2, epochs=2, steps_per_epoch=2, slices_per_step=2, policy="ps-async", hyper={},
        schedule={"schedule": "linear", "warmup_steps": 0, "final_factor": 0.2},
    )  # fmt: skip
    policy = make_policy("ps-async", torch.zeros(1), Hyper(lr=1.0, workers=2), {})
    shard = Shard(0, policy, lambda *release: None, config.lr_factor_by_push_count)
    seen = []
    for number in (0, 1, 1, 2, 3, 4, 5, 6, 7):
        shard.push(0, number, None if number == 3 else torch.ones(1), ALIVE)
        seen.append(policy.lr)
    assert seen == pytest.approx([1, 1, 1, 0.8, 0.8, 0.6, 0.6, 0.4, 0.4])
    assert policy.weights.tolist() == pytest.approx([-(1 + 1 + 0.8 + 0.6 + 0.6 + 0.4 + 0.4)])


def test_staleness_is_what_others_did_since_the_read():
    shard, _, _ = make_shard()
    out = torch.empty(4)
    shard.view(0, out, ALIVE)
    shard.view(1, out, ALIVE)
    for number in range(3):
        shard.push(0, number, torch.ones(4), ALIVE)
        assert shard.view(0, out, ALIVE) == number + 1
    shard.push(1, 3, torch.ones(4), ALIVE)
    assert dict(shard.staleness) == {0: 3, 3: 1}


def test_what_was_lent_stays_while_others_push():
    shard, weights, _ = make_shard()
    with shard.lend_weights(0, torch.empty(4), ALIVE) as (lent, version):
        assert lent.data_ptr() == weights.data_ptr()  # nothing was copied
        shard.push(1, 0, torch.ones(4), ALIVE)
        with shard.lend_weights(1, torch.empty(4), ALIVE) as (later, later_version):
            shard.push(0, 1, torch.ones(4), ALIVE)
            assert (lent.tolist(), version) == ([0.0] * 4, 0)
            assert (later.tolist(), later_version) == ([-1.0] * 4, 1)
    assert shard.policy.weights.tolist() == [-2.0] * 4
    assert dict(shard.staleness) == {0: 1, 1: 1}
    now = shard.policy.weights.data_ptr()
    with shard.lend_weights(0, torch.empty(4), ALIVE):
        pass
    shard.push(0, 2, torch.ones(4), ALIVE)
    assert shard.policy.weights.data_ptr() == now  # nobody was reading: changed in place


def test_pushes_beside_a_read_take_turns_with_two_tensors():
    """So that none of them touches new memory."""
    shard, _, _ = make_shard()
    places = set()
    for ticket in range(20):
        with shard.lend_weights(0, torch.empty(4), ALIVE) as (lent, _):
            shard.push(1, ticket, torch.ones(4), ALIVE)
            assert lent.tolist() == [-float(ticket)] * 4
        places.add(shard.policy.weights.data_ptr())
    assert len(places) == 2
    assert shard.policy.weights.tolist() == [-20.0] * 4


def test_what_two_have_borrowed_is_free_when_both_have_read_it():
    shard, _, _ = make_shard(workers=3)
    first, second = (shard.lend_weights(worker, torch.empty(4), ALIVE) for worker in (0, 1))
    lent, _ = first.__enter__()
    assert second.__enter__()[0] is lent
    shard.push(2, 0, torch.ones(4), ALIVE)
    first.__exit__(None, None, None)
    with shard.lend_weights(0, torch.empty(4), ALIVE):
        shard.push(2, 1, torch.ones(4), ALIVE)  # must not go where the second still reads
        assert lent.tolist() == [0.0] * 4
    second.__exit__(None, None, None)
    assert shard.policy.weights.tolist() == [-2.0] * 4


@pytest.mark.parametrize(
    "end",
    [lambda shard: shard.remove_worker(1), lambda shard: shard.finish()],
    ids=["leave", "finish"],
)
def test_what_was_lent_stays_when_a_held_push_is_applied_because_workers_leave(end):
    shard, _, _ = make_shard("ps-sync")
    shard.push(0, 0, torch.ones(4), ALIVE)
    with shard.lend_weights(1, torch.empty(4), ALIVE) as (lent, _):
        end(shard)
        assert lent.tolist() == [0.0] * 4
    assert shard.policy.weights.tolist() == [-1.0] * 4


def test_a_policy_with_its_own_view_lends_that():
    shard, weights, _ = make_shard("ps-dana")
    spare = torch.empty(4)
    with shard.lend_weights(0, spare, ALIVE) as (lent, _):
        assert lent is spare
        shard.push(1, 0, torch.ones(4), ALIVE)
        assert lent.tolist() == [0.0] * 4
    assert shard.policy.weights is weights  # so no copy was made of them


def test_nothing_lent_is_ever_torn():
    shard, _, _ = make_shard(workers=3, weights=torch.zeros(100_000))
    done, torn = threading.Event(), []

    def push():
        for ticket in range(300):
            shard.push(2, ticket, torch.ones(100_000), ALIVE)
        done.set()

    def read(worker):
        spare = torch.empty(100_000)
        while not done.is_set():
            with shard.lend_weights(worker, spare, ALIVE) as (lent, version):
                for _ in range(3):
                    if not bool((lent == -version).all()):
                        torn.append(version)

    threads = [threading.Thread(target=read, args=(w,)) for w in (0, 1)]
    for thread in [*threads, pusher := threading.Thread(target=push)]:
        thread.start()
    for thread in [*threads, pusher]:
        thread.join(LIMIT_S)
    assert done.is_set()
    assert not torn
    assert bool((shard.policy.weights == -300).all())


def test_a_barrier_answers_all_with_the_last():
    shard, weights, released = make_shard("ps-sync")
    shard.push(1, 0, torch.ones(4), ALIVE)
    assert released == []
    shard.push(0, 1, 3 * torch.ones(4), ALIVE)
    assert sorted(released) == [(0, 5), (1, 5)]
    assert weights.tolist() == [-2.0] * 4


def test_a_worker_that_leaves_frees_the_others_and_may_come_back():
    shard, _, released = make_shard("ps-ssp", staleness_bound=0)
    shard.push(0, 0, torch.ones(4), ALIVE)
    assert released == []
    shard.remove_worker(1)
    shard.remove_worker(1)
    assert released == [(0, 5)]
    shard.add_worker(1)
    assert released == [(0, 5), (1, 5)]
    shard.push(1, 1, torch.ones(4), ALIVE)
    assert released[2:] == [(1, 5)] or shard.policy.ready(0)


def test_who_waits_when_all_tickets_have_come_may_read_though_one_is_done_again():
    """Its holder was lost before every server had all of it."""
    shard, _, released = make_shard("ps-ssp", workers=3, staleness_bound=0)
    shard.push(0, 0, torch.ones(4), ALIVE)
    shard.push(1, 1, torch.ones(4), ALIVE)
    assert released == []
    shard.finish()
    assert sorted(released) == [(0, 5), (1, 5)]
    shard.push(2, 1, torch.ones(4), ALIVE)
    assert released[2:] == [(2, 5)]


def test_a_snapshot_keeps_what_was_there_when_it_was_taken():
    shard, weights, _ = make_shard()
    late, early = torch.full((4,), 9.0), torch.full((4,), 9.0)
    shard.request_snapshot(early)
    shard.push(0, 0, torch.ones(4), ALIVE)  # copies before it changes anything
    shard.request_snapshot(late)
    shard.save_snapshots()
    shard.push(0, 1, torch.ones(4), ALIVE)
    assert early.tolist() == [0.0] * 4
    assert late.tolist() == [-1.0] * 4
    assert weights.tolist() == [-2.0] * 4


def test_a_snapshot_is_of_the_weights_where_workers_read_ahead_of_them():
    shard, weights, _ = make_shard("ps-preview", workers=3)
    read, kept = torch.empty(4), torch.empty(4)
    for ticket in range(4):  # a bucket, and one more
        shard.push(ticket % 3, ticket, torch.ones(4), ALIVE)
    shard.request_snapshot(kept)
    shard.view(1, read, ALIVE)
    shard.save_snapshots()
    assert torch.equal(kept, weights)
    assert not torch.equal(read, weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_snapshots_are_written_whole_and_read_back(tmp_path, dtype):
    weights = torch.arange(6, dtype=dtype)
    shards = [make_shard(weights=weights[:4])[0], make_shard(weights=weights[4:])[0]]
    buffers = torch.arange(3, dtype=torch.float32)
    failures = []
    writers = [SnapshotWriter(tmp_path, server, 2, failures.append) for server in (0, 1)]
    writers[0].request_snapshot(3, 1.5, shards, buffers)
    writers[0].close()
    with pytest.raises(FileNotFoundError, match=r"epoch3\.1\.json is missing"):
        load_snapshot(tmp_path, 3)
    writers[1].request_snapshot(3, 1.6, shards[:1], None)
    writers[1].close()
    seconds, read, read_buffers = load_snapshot(tmp_path, 3)
    assert seconds == 1.5
    assert torch.equal(read, torch.cat([weights, weights[:4]]))
    assert torch.equal(read_buffers, buffers)
    assert not list(tmp_path.glob("*.part"))
    assert failures == []
    delete_snapshot(tmp_path, 2)
    assert load_snapshot(tmp_path, 3)[0] == 1.5
    delete_snapshot(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []  # not gone: the next epoch may still be on its way


# --- buffers -------------------------------------------------------------------------------------


def test_the_servers_buffers_are_the_mean_of_each_workers_latest():
    mean = BufferMean(torch.full((2,), 8.0))
    assert mean.compute_mean().tolist() == [8.0, 8.0]
    pushed = torch.tensor([1.0, 2.0])
    mean.store_worker_buffers(0, pushed, ALIVE)
    pushed.zero_()  # it is the caller's again
    assert mean.compute_mean().tolist() == [1.0, 2.0]
    mean.store_worker_buffers(1, torch.tensor([5.0, 6.0]), ALIVE)
    mean.store_worker_buffers(1, torch.tensor([3.0, 4.0]), ALIVE)
    mean.store_worker_buffers(1, torch.tensor([9.0, 9.0]), DEAD)
    assert mean.compute_mean().tolist() == [2.0, 3.0]


def test_a_lost_workers_buffers_count_only_if_there_are_no_others():
    mean = BufferMean(torch.zeros(1))
    mean.store_worker_buffers(0, torch.tensor([1.0]), ALIVE)
    mean.forget_worker(0)
    assert mean.compute_mean().tolist() == [1.0]
    mean.store_worker_buffers(1, torch.tensor([5.0]), ALIVE)
    assert mean.compute_mean().tolist() == [5.0]
