"""A worker's connection to parameter servers that may be restarted during the training."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stratbench.extensions.elastic.servers.journal import read_run_end_mark
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.tickets import Evaluation, Ticket
from stratbench.extensions.servers.wire.handshake import JoinLater, JoinRefused
from stratbench.extensions.servers.wire.link import Left, ServerLost
from stratbench.extensions.servers.wire.transport import get_rendezvous_path

#: Maximum seconds after which a worker tries again to join, if all places were taken. The time doubles from 1
#: s on.
MAX_PAUSE_S = 30.0
#: Seconds without an answer of the servers after which a worker gives up.
SILENCE_S = 60.0
#: Time limit in seconds of one attempt to join. After it a worker checks whether the run is over.
ATTEMPT_S = 3.0
#: Seconds in which a worker that must leave may complete its present batch.
BATCH_S = 2.0
_RETRY_S = 0.5

#: Next work of a worker: a ticket, an evaluation, or None because the training is over.
Assignment = Ticket | Evaluation | None


class RunOverError(Exception):
    """The training was over before this worker could join it."""


class ReturningChannel:
    """Channel with which a worker returns to the servers after they were restarted.

    Each start of the servers is an *incarnation*. After the loss of an incarnation, the channel joins the
    next one, and its first ticket replaces the awaited one. A push in progress is lost, and its ticket is
    computed again. When `leave_requested` is set, the channel leaves after the current batch, or after
    BATCH_S if the batch takes longer. Later calls raise Left. All other methods are those of a `Channel`.
    """

    #: Number of the worker that evaluates at the end. None: each epoch is evaluated during the training.
    evaluator = None

    def __init__(
        self,
        connect: Callable[[int], Channel],
        rendezvous: str | Path,
        folder: str | Path,
        leave_requested: threading.Event,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Wait for a free place among the workers, and join the training.

        Args:
            connect: Makes a channel to an incarnation of the servers.
            rendezvous: Path of the servers' rendezvous files, without their endings.
            folder: Folder of the servers, in which they mark that the run is over.
            leave_requested: Set when this worker must leave.
            silence_s: Seconds without an answer after which the servers are lost.

        Raises:
            RunOverError: If the run is over.
            ServerLost: If no server answers.
            Left: If `leave_requested` is set before this worker has joined.
        """
        self._connect, self._silence_s = connect, silence_s
        self._rendezvous, self._folder = get_rendezvous_path(rendezvous, 0), folder
        self._leave_requested = leave_requested
        self._channel: Channel | None = None
        self._waited_s, self._moved = 0.0, [0]
        self._joined_incarnation: int | None = None
        self.returns = 0  # number of times that this worker joined restarted servers
        self.left = False
        if not self._join_server_incarnation():
            raise RunOverError("the training was over before this worker joined it")
        threading.Thread(target=self._leave_when_requested, daemon=True).start()

    def __getattr__(self, name: str):
        return getattr(self._channel, name)

    # --- joining -------------------------------------------------------------------------------------

    def _join_server_incarnation(self) -> bool:
        """Try to join until the present servers admit this worker. Return False if the training is over."""
        heard, pause_s = time.monotonic(), 1.0
        while not self._leave_requested.is_set():
            if read_run_end_mark(self._folder) is not None:
                return False
            incarnation = None
            try:
                incarnation = self._read_server_incarnation()
                self._channel = self._connect(incarnation)
                self._joined_incarnation = incarnation
                if not self._leave_requested.is_set():
                    return True
                # The request to leave may have closed only the channel to the lost servers.
                self._channel.leave()
            except JoinLater as later:
                print(f"no free place at present: {later}", flush=True)
                heard = time.monotonic()
                self._leave_requested.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except (OSError, ValueError) as error:
                # If a server of the lost incarnation still runs, it rejects the worker, which it has admitted
                # before.
                if isinstance(error, JoinRefused) and incarnation != self._joined_incarnation:
                    raise
                if time.monotonic() - heard > self._silence_s:
                    raise ServerLost(
                        f"no parameter server answered for {self._silence_s:g} s: {error}"
                    ) from None
                self._leave_requested.wait(_RETRY_S)
        self.left = True
        raise Left("this worker got a signal to leave the training")

    def _read_server_incarnation(self) -> int:
        return int(json.loads(self._rendezvous.read_text(encoding="utf-8"))["incarnation"])

    # --- methods for the worker ------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds that this worker waited for servers, summed over all starts of the servers."""
        return self._waited_s + self._channel.wait_s

    @property
    def sent_and_received_bytes_by_server(self) -> list[int]:
        """Bytes that this worker exchanged with each server, summed over all starts of the servers."""
        current = self._channel.sent_and_received_bytes_by_server
        before = self._moved if len(self._moved) == len(current) else [0] * len(current)
        return [a + b for a, b in zip(before, current, strict=True)]

    def wait_for_first_ticket(self) -> Assignment:
        """Wait for the worker's first ticket or evaluation, and return it. None if the run is over."""
        return self._retry_after_server_loss(Channel.wait_for_first_ticket)

    def push_pull(self) -> Assignment:
        """Push gradients to the servers, and return the worker's next ticket or evaluation."""
        return self._retry_after_server_loss(Channel.push_pull)

    def send_evaluation(self, results: dict[str, float | None]) -> Assignment:
        """Send an evaluation's results, and return what the servers assign to the worker next.

        That is a ticket or an evaluation, or None if the training is over.
        """
        return self._retry_after_server_loss(lambda channel: channel.send_evaluation(results))

    def rehearse_exchange(self) -> None:
        """Exchange data with the servers in the warm-up. If they are lost, join the restarted servers."""
        try:
            self._channel.rehearse_exchange()
        except ServerLost as lost:
            self._rejoin_after_server_loss(lost)

    def _retry_after_server_loss(self, exchange: Callable[[Channel], Assignment]) -> Assignment:
        """Exchange messages with the servers. If the servers are lost, join the restarted ones.

        Args:
            exchange: Sends a message by the channel, and returns what the servers assign next.

        Returns:
            The assignment; after a loss, that of the restarted servers. None if the training is over.
        """
        while True:
            try:
                assignment = exchange(self._channel)
                if self._leave_requested.is_set() and assignment is not None:
                    self._channel.leave()
                    raise Left("this worker got a signal to leave the training")
                return assignment
            except ServerLost as lost:
                if not self._rejoin_after_server_loss(lost):
                    return None
                exchange = Channel.wait_for_first_ticket
            except Left:
                self.left = True
                raise

    def _rejoin_after_server_loss(self, loss: ServerLost) -> bool:
        """Join the restarted servers after a loss. Return False if the training is over."""
        print(f"{loss}; waiting until the servers are restarted", flush=True)
        # The measurements of the lost channel become part of this worker's totals.
        self._waited_s, self._moved = self.wait_s, self.sent_and_received_bytes_by_server
        self._channel.reset_counters()
        self._channel.close()
        self.returns += 1
        return self._join_server_incarnation()

    def _leave_when_requested(self) -> None:
        self._leave_requested.wait()
        time.sleep(BATCH_S)
        self._channel.leave()

    def close(self) -> None:
        """Close the connection to the servers."""
        self._channel.close()
