"""A worker's channel to servers that may be restarted. The worker joins each incarnation again."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stratbench.extensions.elastic.servers.journal import read_end_mark
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.tickets import Evaluation, Ticket
from stratbench.extensions.servers.wire.handshake import JoinLater, JoinRefused
from stratbench.extensions.servers.wire.link import Left, ServerLost
from stratbench.extensions.servers.wire.transport import get_rendezvous_path

#: Longest pause in seconds before a worker without a free place asks again; pauses double from one second on.
MAX_PAUSE_S = 30.0
#: Seconds after which a worker gives up if no server answers.
SILENCE_S = 60.0
#: Longest time of one attempt to join, in seconds; between attempts a worker checks whether the run is over.
ATTEMPT_S = 3.0
#: Seconds in which a worker that must leave may complete its batch.
BATCH_S = 2.0
_RETRY_S = 0.5

Work = Ticket | Evaluation | None


class RunOverError(Exception):
    """The run was over before this worker could join it."""


class ReturningChannel:
    """Channel that joins the next incarnation of the servers if the present servers are lost.

    All other methods are those of a `Channel`. After a loss the first ticket of the next incarnation replaces
    the awaited one. A push in progress is lost, and its ticket is computed again. When `leaving` is set, the
    channel leaves after the current batch, or after BATCH_S if the batch takes longer. Later calls raise
    Left.
    """

    #: No worker evaluates at the end, because each epoch is evaluated during the training.
    evaluator = None

    def __init__(
        self,
        connect: Callable[[int], Channel],
        rendezvous: str | Path,
        folder: str | Path,
        leaving: threading.Event,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Wait for a free slot, and join the run.

        Args:
            connect: Makes a channel to an incarnation of the servers.
            rendezvous: Path of the servers' rendezvous files, without their endings.
            folder: Folder of the servers, in which they mark that the run is over.
            leaving: Set when this worker must leave.
            silence_s: Time without an answer after which the servers are lost.

        Raises:
            RunOverError: If the run is over.
            ServerLost: If no server answers.
            Left: If `leaving` is set before this worker has joined.
        """
        self._connect, self._silence_s = connect, silence_s
        self._rendezvous, self._folder = get_rendezvous_path(rendezvous, 0), folder
        self._leaving = leaving
        self._channel: Channel | None = None
        self._waited_s, self._moved = 0.0, [0]
        self._joined_incarnation: int | None = None
        self.returns = 0  # number of times that this worker joined a later incarnation
        self.left = False
        if not self._join_incarnation():
            raise RunOverError("the run was over before this worker joined")
        threading.Thread(target=self._leave_after_delay, daemon=True).start()

    def __getattr__(self, name: str):
        return getattr(self._channel, name)

    # --- joining -------------------------------------------------------------------------------------

    def _join_incarnation(self) -> bool:
        """Try to join until an incarnation of the servers admits this worker.

        Return False if the run is over.
        """
        heard, pause_s = time.monotonic(), 1.0
        while not self._leaving.is_set():
            if read_end_mark(self._folder) is not None:
                return False
            incarnation = None
            try:
                incarnation = self._read_incarnation()
                self._channel = self._connect(incarnation)
                self._joined_incarnation = incarnation
                if not self._leaving.is_set():
                    return True
                # another thread has asked to leave, perhaps on the channel before this one
                self._channel.leave()
            except JoinLater as later:
                print(f"no free place at present: {later}", flush=True)
                heard = time.monotonic()
                self._leaving.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except (OSError, ValueError) as error:
                # A server of the lost incarnation may still run, and reject a worker that it has admitted
                # before.
                if isinstance(error, JoinRefused) and incarnation != self._joined_incarnation:
                    raise
                if time.monotonic() - heard > self._silence_s:
                    raise ServerLost(
                        f"no server answered for {self._silence_s:g} s: {error}"
                    ) from None
                self._leaving.wait(_RETRY_S)
        self.left = True
        raise Left("this worker got a signal to leave")

    def _read_incarnation(self) -> int:
        return int(json.loads(self._rendezvous.read_text(encoding="utf-8"))["incarnation"])

    def _close_lost_channel(self) -> None:
        """Close the channel to lost servers, and add the channel's measurements to the totals."""
        self._waited_s, self._moved = self.wait_s, self.moved_bytes
        self._channel.reset_counters()
        self._channel.close()

    # --- what the worker calls -------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds that this worker waited for servers, summed over all incarnations of the servers."""
        return self._waited_s + self._channel.wait_s

    @property
    def moved_bytes(self) -> list[int]:
        """Bytes sent to and received from each server, summed over all incarnations of the servers."""
        current = self._channel.moved_bytes
        before = self._moved if len(self._moved) == len(current) else [0] * len(current)
        return [a + b for a, b in zip(before, current, strict=True)]

    def wait_for_first_ticket(self) -> Work:
        """Wait for the first ticket or evaluation. The result is None if the run has ended."""
        return self._repeat_after_loss(Channel.wait_for_first_ticket)

    def push_pull(self) -> Work:
        """Push gradients and return the next ticket or evaluation, as `Channel.push_pull` does."""
        return self._repeat_after_loss(Channel.push_pull)

    def send_evaluation(self, figures: dict[str, float | None]) -> Work:
        """Send evaluation results, and return the next ticket or evaluation."""
        return self._repeat_after_loss(lambda channel: channel.send_evaluation(figures))

    def rehearse_exchange(self) -> None:
        """Exchange data with the servers in the warm-up. If they are lost, join the next incarnation."""
        try:
            self._channel.rehearse_exchange()
        except ServerLost as lost:
            self._join_after_loss(lost)

    def _repeat_after_loss(self, do: Callable[[Channel], Work]) -> Work:
        """Call `do` with the channel. If the servers are lost, join their next incarnation instead."""
        while True:
            try:
                work = do(self._channel)
                if self._leaving.is_set() and work is not None:
                    self._channel.leave()
                    raise Left("this worker got a signal to leave")
                return work
            except ServerLost as lost:
                if not self._join_after_loss(lost):
                    return None
                do = Channel.wait_for_first_ticket
            except Left:
                self.left = True
                raise

    def _join_after_loss(self, lost: ServerLost) -> bool:
        """Join the next incarnation of the servers. Return False if the run is over."""
        print(f"{lost}; looking for the servers' next incarnation", flush=True)
        self._close_lost_channel()
        self.returns += 1
        return self._join_incarnation()

    def _leave_after_delay(self) -> None:
        self._leaving.wait()
        time.sleep(BATCH_S)
        self._channel.leave()

    def close(self) -> None:
        """Close the present channel to the servers."""
        self._channel.close()
