"""Runs a parameter server that can be restarted, and whose workers join and leave."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratbench.extensions.elastic.servers.config import ElasticServerConfig
from stratbench.extensions.elastic.servers.evaluations import Evaluations, parse_score_message
from stratbench.extensions.elastic.servers.journal import (
    CompletedTickets,
    Journal,
    collect_score_events,
    delete_server_state,
    read_journal,
    read_run_end_mark,
    write_run_end_mark,
)
from stratbench.extensions.elastic.servers.saved_state import (
    StateSaver,
    find_tickets_applied_by_all_shards,
    load_server_state,
)
from stratbench.extensions.servers.ps.member import Member
from stratbench.extensions.servers.ps.membership import OpenMembership
from stratbench.extensions.servers.ps.server_run import ServerRun
from stratbench.extensions.servers.ps.snapshots import delete_later_snapshots, delete_snapshot
from stratbench.extensions.servers.ps.store import Store
from stratbench.extensions.servers.wire.frames import ComeAgain, Frame, Kind, ProtocolError

#: Maximum number of snapshots of the weights on disk: of the last epoch, of epochs in evaluation, and one
#: more.
_SNAPSHOTS_KEPT = 4
#: Seconds after which a worker counts as lost if its host does not answer. The limit for heartbeats of the
#: process is longer, because user code may hold the interpreter lock for a while.
_VANISHED_S = 10.0


class ElasticRun(ServerRun):
    """Training on an elastic parameter server, which continues without workers until others join.

    Server 0 assigns evaluations to workers in addition to tickets, and writes the journal.
    """

    membership_class = OpenMembership

    def __init__(self, config: ElasticServerConfig, secret: bytes) -> None:
        super().__init__(config, secret)
        own, self._first = config.elastic, config.server == 0
        self.incarnation = own.incarnation
        self._own, self._folder = own, Path(own.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.suspended = False
        # when a worker first got a ticket, at the servers' first start
        self._began_unix_s: float | None = None
        self._done_twice: list[int] = []
        self._begun: set[int] = set()  # numbers of workers that have got a ticket
        self._settled_before = 0  # number of tickets completed before this start of the servers
        self._saver = StateSaver(self._folder, config.server, self._stop_with_error)
        self._saved_s = 0.0  # time.monotonic() when the state was last saved
        self._finished_at: int | None = None  # epoch whose results ended the training early
        evaluates = self._first and config.snapshot_dir is not None and config.steps is None
        self._evaluations = Evaluations(
            self.plan, evaluates, own.target_score, own.higher_is_better
        )
        if self._first:
            self._journal = Journal(own.folder, own.incarnation)
            self._ledger = CompletedTickets(own.folder, own.incarnation)
        settled = self._restore_saved_state() if own.resumes_saved_state else set()
        if not own.resumes_saved_state:
            delete_server_state(own.folder, config.server)
        if config.snapshot_dir is not None:
            delete_later_snapshots(config.snapshot_dir, config.server, len(self.epochs.ends))
        if self._first:
            self._done_twice = sorted(self._ledger.read_ticket_numbers() - settled)
            self._ledger.mark_tickets_incomplete(self._done_twice)
            self._journal.append_event(
                "incarnation", settled=self.tickets.n_settled, done_twice=len(self._done_twice)
            )

    # --- restarts -----------------------------------------------------------------------------------------

    def _restore_saved_state(self) -> set[int]:
        """Restore the saved state before any worker joins. Return the completed tickets."""
        c = self.config
        saved = load_server_state(self._folder, c.server)
        settled = find_tickets_applied_by_all_shards(self._folder, c.n_servers)
        self._store = Store(saved.layout, c.shard_bytes, c.server, c.n_servers, c.max_model_bytes)
        self._store.restore_state(self._make_shard, saved.shards, saved.buffers)
        self._initialised = True
        self._began_unix_s = saved.extra_values["began_unix_s"]
        self._settled_before = len(settled)
        spent_s = time.time() - self._began_unix_s
        self.epochs.restore_completed_tickets(
            settled, saved.extra_values["ends"], spent_s, self._store
        )
        self.tickets.mark_completed_before_restart(list(settled))
        if self._first:
            self.lost, self.tickets.reassigned = (
                saved.extra_values["lost"],
                saved.extra_values["reassigned"],
            )
            self._evaluations.restore_scores(
                collect_score_events(read_journal(self._folder)), len(settled)
            )
        with self._lock:
            self._finish_if_all_tickets_completed()
            if self.epochs.is_complete and not self._first:
                self.done = True
        return set(settled)

    def _start_training_clock(self) -> None:
        """Let the clock count from the first ticket of the servers' first start.

        The training time thus includes the time between restarts.
        """
        now_unix_s = time.time()
        if self._began_unix_s is None:
            self._began_unix_s = now_unix_s
        self._first_ticket_s = time.perf_counter() - (now_unix_s - self._began_unix_s)

    def _start_state_save(self) -> None:
        """Start to save this server's state on another thread."""
        self._saver.start_state_save(self._store, self._collect_values_to_save)
        self._saved_s = time.monotonic()

    def _collect_values_to_save(self) -> dict[str, Any]:
        """Return the values to save in addition to the shards of the weights.

        Call this after the shards were saved. Wait until the snapshots of all ended epochs are on disk.
        """
        with self._lock:
            facts = {
                "began_unix_s": self._began_unix_s,
                "ends": list(self.epochs.ends),
                "lost": list(self.lost),
                "reassigned": list(self.tickets.reassigned),
            }
        if self._writer is not None:
            self._writer.wait_for_snapshots()
        return facts

    def suspend_run(self) -> None:
        """Stop the server and save its state, so that it can be restarted."""
        self.suspended = True
        self.over.set()

    # --- joining -------------------------------------------------------------------------------------

    def _admit_worker(self, connection: Any, hello: dict[str, Any], transport: str) -> Member:
        if self.over.is_set():
            raise ComeAgain(self.error or "the run is over")
        if hello.get("incarnation") != self._own.incarnation:
            raise ComeAgain(
                f"the servers were restarted (incarnation {self._own.incarnation}); join again"
            )
        member = super()._admit_worker(connection, hello, transport)
        connection.vanished_s = _VANISHED_S
        return member

    def _make_extra_welcome_fields(self) -> dict[str, Any]:
        return {"incarnation": self._own.incarnation}

    @property
    def _max_kept_snapshots(self) -> int:
        return min(_SNAPSHOTS_KEPT, self.config.epochs)

    def _add_ready_member(self, member: Member) -> None:
        if self._first and not self.done:
            self._journal.append_event("join", worker=member.worker, place=member.place)
        late = self._started or self.done
        super()._add_ready_member(member)
        if late and self._first and self.done:
            member.queue_frame(Frame(Kind.DONE, shard=self._evaluator))
        elif late and self._first:
            self._hand_ticket_to_worker(member)

    # --- working -------------------------------------------------------------------------------------

    def _get_frame_handlers(self) -> dict[Kind, Callable[[Member, Frame], None]]:
        return super()._get_frame_handlers() | {Kind.DONE: self._handle_done_frame}

    def _record_received_gradients(self, worker: int, ticket_number: int, server: int) -> None:
        super()._record_received_gradients(worker, ticket_number, server)
        if self.tickets.settled_by[ticket_number] == worker:
            self._ledger.mark_ticket_completed(ticket_number)

    def _finish_if_all_tickets_completed(self) -> None:
        if self.done or not self._first:
            return
        self._evaluations.queue_ended_epochs(self.tickets.n_settled)
        self._finished_at = self._evaluations.epoch_that_ends_training
        all_done = self.tickets.are_all_completed and self._evaluations.are_all_epochs_evaluated
        if all_done or self._finished_at is not None:
            self._finish_training()
            self._end_run_without_workers()
        elif self._evaluations.has_epoch_to_evaluate:
            self._hand_tickets_to_idle_workers()

    @property
    def _hands_out_tickets(self) -> bool:
        return not self.done and not self._evaluations.has_epoch_to_evaluate

    def _hand_ticket_to_worker(self, member: Member) -> None:
        if self.done or member.reserved_ticket is not None:
            super()._hand_ticket_to_worker(member)
        elif (epoch := self._evaluations.assign_epoch_to_evaluate(member.worker)) is not None:
            self._hand_out_evaluation(member, epoch)
        else:
            super()._hand_ticket_to_worker(member)
        if member.ticket is not None and member.worker not in self._begun:
            self._begun.add(member.worker)
            self._journal.append_event("begin", worker=member.worker)

    def _hand_out_evaluation(self, member: Member, epoch: int) -> None:
        """Tell a worker to evaluate an epoch. Policies do not wait for its gradients meanwhile."""
        if not member.idle:
            self._mark_worker_idle(member)
        member.evaluated_epoch = epoch
        member.queue_frame(Frame(Kind.EVAL, shard=epoch))

    def _on_score(self, member: Member, values: Any) -> None:
        results = parse_score_message(values)
        with self._lock:
            if not member.alive or member.evaluated_epoch is None:
                raise ProtocolError("unexpected frame: SCORE from a worker that evaluates no epoch")
            epoch, member.evaluated_epoch = (
                self._evaluations.store_results_and_return_epoch(member.worker, results),
                None,
            )
            facts = {"epoch": epoch, "end_s": self.epochs.ends[epoch]["end_s"]}
            facts |= {"settled": self._evaluations.count_tickets_until_epoch_end(epoch)}
            self._journal.append_event("score", worker=member.worker, **facts, **results)
            self._finish_if_all_tickets_completed()
            if member.idle and member.evaluated_epoch is None:
                self._hand_ticket_to_worker(member)
        delete_snapshot(self.config.snapshot_dir, epoch)

    def _handle_done_frame(self, member: Member, frame: Frame) -> None:
        """Handle a DONE frame: a worker reports that server 0 has ended the training.

        Server 0 sends DONE to workers, which send it on to the other servers.
        """
        if self._first:
            raise ProtocolError(
                "unexpected frame: DONE at server 0, which itself ends the training"
            )
        self.done = True

    def _finish_training(self) -> None:
        super()._finish_training()
        self._journal.append_event(
            "end", workers=[m.worker for m in self._membership.ready_members]
        )

    # --- leaving -------------------------------------------------------------------------------------

    def _on_leave(self, member: Member) -> None:
        with self._lock:
            if not member.alive:
                return
            member.alive = False
            # A worker in its warm-up has no event in the journal, because it has not joined the training.
            if self._first and member.is_ready_to_start:
                tickets = self.tickets.list_held_tickets(member.worker)
                self._journal.append_event("leave", worker=member.worker, tickets=tickets)
            if not self.done:
                self._free_shards_and_evaluation_of_worker(member)
                super()._continue_without_member(member)
            self._end_run_without_workers()
        member.queue_end()

    def _continue_without_member(self, member: Member) -> None:
        """Continue the training without a lost worker, and write its loss to the journal."""
        if self._first:
            tickets = self.tickets.list_held_tickets(member.worker)
            reason = self.lost[-1]["reason"]
            self._journal.append_event("loss", worker=member.worker, tickets=tickets, reason=reason)
        self._free_shards_and_evaluation_of_worker(member)
        super()._continue_without_member(member)

    def _free_shards_and_evaluation_of_worker(self, member: Member) -> None:
        """Free the shards and the evaluation of a worker that has left."""
        member.stop_sending_weights()
        self._evaluations.requeue_epoch_of_lost_worker(member.worker)

    def _end_run_without_workers(self) -> None:
        """End the run if the training is complete and all workers have left.

        Workers that are still in their warm-up end by themselves.
        """
        if self.done and not self._membership.ready_members:
            self.over.set()

    def _check_start_deadline(self, age_s: float) -> None:
        if self._started and time.monotonic() - self._saved_s > self._own.save_interval_s:
            self._start_state_save()
        if not self._first and read_run_end_mark(self._folder) is not None:
            with self._lock:
                self.done = True
                self._end_run_without_workers()

    def close(self) -> None:
        goes_on = self._started and not self.done and self.error is None
        with self._lock:
            live = self._membership.live_members
        self._close_member_connections([m for m in live if goes_on or not m.is_ready_to_start])
        # Before `super().close()`, because saving waits for snapshots, whose writer it stops.
        self._saver.wait_for_state_save()
        if goes_on:
            self._start_state_save()
            self._saver.wait_for_state_save()
        super().close()
        if self._first:
            if self.done or self.error is not None:
                write_run_end_mark(self._folder, self.error)
            self._journal.close()
            self._ledger.close()

    def _close_member_connections(self, members: list[Member]) -> None:
        """Close the connections to some workers, so that their later pushes do not count."""
        with self._lock:
            for member in members:
                member.alive = False
                member.connection.close()

    def _count_tickets_after_end(self) -> int:
        """Return the number of tickets completed after the epoch whose results ended the training."""
        if self._finished_at is None:
            return 0
        return self.tickets.n_settled - self._evaluations.count_tickets_until_epoch_end(
            self._finished_at
        )

    def statistics(self) -> dict[str, Any]:
        statistics = super().statistics()
        if self._finished_at is not None:
            statistics["train_time_s"] = self.epochs.ends[self._finished_at]["end_s"]
        places = {m.worker: m.place for m in self._members.values()}
        for row in statistics["workers"]:
            row["place"] = places[row["worker"]]
        statistics["elastic"] = {
            "incarnation": self._own.incarnation,
            "suspended": self.suspended,
            "settled_before": self._settled_before,
            "done_twice": len(self._done_twice),
            "began_unix_s": self._began_unix_s,
            "finished_at_epoch": self._finished_at,
            "after_the_end": self._count_tickets_after_end(),
            "saves": self._saver.count,
            "held_up_s": self._saver.held_up_s,
            "scores": [{"epoch": e, **s} for e, s in sorted(self._evaluations.scores.items())],
        }
        return statistics


def make_elastic_run(config: ElasticServerConfig, secret: bytes) -> ElasticRun:
    """Make the run of an elastic server. On SIGTERM it saves its state and stops."""
    run = ElasticRun(config, secret)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: run.suspend_run())
    return run
