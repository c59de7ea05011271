"""Tickets: every batch of the plan once, whoever is lost on the way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratbench.extensions.servers.ps.store import EpochLog
from stratbench.extensions.servers.ps.tickets import CompactIntSet, Ticket, TicketPlan, Tickets


def test_a_plan_numbers_its_batches_by_epoch_step_and_slice():
    plan = TicketPlan(2, 3, 4)
    tickets = [plan.get_ticket(n) for n in range(len(plan))]
    assert tickets[0] == Ticket(0, 0, 0, 0)
    assert tickets[5] == Ticket(5, 0, 1, 1)
    assert tickets[23] == Ticket(23, 1, 2, 3)
    assert len({t[1:] for t in tickets}) == 24
    assert [plan.compute_global_step(n) for n in (0, 3, 4, 23)] == [0, 0, 1, 5]


@pytest.mark.parametrize("number", [-1, 24])
def test_a_ticket_outside_the_plan_is_an_error(number):
    with pytest.raises(IndexError, match=r"no ticket .*, only 0 to 23"):
        TicketPlan(2, 3, 4).get_ticket(number)


def test_an_empty_plan_is_an_error():
    with pytest.raises(ValueError, match="must be at least 1"):
        TicketPlan(1, 0, 4)


@given(st.lists(st.integers(0, 40)))
def test_once_is_a_set(numbers):
    once, reference = CompactIntSet(), set()
    for number in numbers:
        assert once.add(number) is (number not in reference)
        reference.add(number)
        assert len(once) == len(reference)
    assert all((n in once) == (n in reference) for n in range(45))


def test_a_worker_gets_its_own_slice_while_that_is_free():
    tickets = Tickets(TicketPlan(1, 2, 3))
    assert [tickets.take_next_ticket(w).slice for w in (2, 0, 1)] == [2, 0, 1]
    assert tickets.take_next_ticket(1)[2:] == (1, 1)
    assert tickets.take_next_ticket(1)[2:] == (1, 0)  # the lowest of what is left


def test_only_the_holder_can_settle_and_only_once():
    tickets = Tickets(TicketPlan(1, 1, 2))
    ticket = tickets.take_next_ticket(0)
    with pytest.raises(KeyError, match="worker 1 does not have ticket 0"):
        tickets.record_received_gradients(1, ticket.number)
    tickets.record_received_gradients(0, ticket.number)
    with pytest.raises(KeyError):
        tickets.record_received_gradients(0, ticket.number)


@pytest.mark.slow
@given(st.data())
def test_every_ticket_is_settled_once_under_any_schedule_of_losses(data):
    plan = TicketPlan(
        data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    )
    n_workers = data.draw(st.integers(1, 4))
    tickets = Tickets(plan)
    live, holding, settled = set(range(n_workers)), {}, []
    while not tickets.are_all_completed:
        worker = data.draw(st.sampled_from(sorted(live)))
        if len(live) > 1 and data.draw(st.integers(0, 9)) == 0:
            live.remove(worker)
            lost = tickets.take_back_tickets(worker)
            assert lost == ([holding.pop(worker)] if worker in holding else [])
        elif worker in holding:
            number = holding.pop(worker)
            tickets.record_received_gradients(worker, number)
            settled.append((number, worker))
        else:
            ticket = tickets.take_next_ticket(worker)
            if ticket is None:
                assert holding  # what is left is in flight
                continue
            assert ticket.number not in holding.values()
            holding[worker] = ticket.number
    assert sorted(n for n, _ in settled) == list(range(len(plan)))
    assert list(tickets.settled_by) == [w for _, w in sorted(settled)]


class Taken:
    """A snapshot writer that only notes."""

    def __init__(self):
        self.epochs = []

    def request_snapshot(self, epoch, seconds, shards, buffers):
        self.epochs.append((epoch, seconds))


def test_epochs_end_one_after_the_other_whichever_tickets_come():
    """Ticket 1 comes late, and twice: its worker was lost when the others were two epochs ahead."""
    finished = []
    shards = {0: SimpleNamespace(finish=lambda: finished.append(True))}
    store, writer = SimpleNamespace(shards=shards, buffers=None), Taken()
    log = EpochLog(TicketPlan(epochs=4, steps_per_epoch=2, slices_per_step=1), writer)
    for second, number in enumerate((0, 2, 3, 4, 5, 1, 1, 6, 7)):
        log.count_completed_ticket(number, float(second), store)
    assert log.ends == [
        {"epoch": 0, "end_s": 1.0},
        {"epoch": 1, "end_s": 3.0},
        {"epoch": 2, "end_s": 5.0},
        {"epoch": 3, "end_s": 8.0},
    ]
    assert writer.epochs == [(e["epoch"], e["end_s"]) for e in log.ends]
    assert finished == [True]
    assert log.is_complete
