"""A worker's channel in an elastic run: it joins, follows the servers' incarnations, and leaves."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stratbench.extensions.elastic.servers.journal import read_end
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.tickets import Evaluation, Ticket
from stratbench.extensions.servers.wire.handshake import JoinLater, JoinRefused
from stratbench.extensions.servers.wire.link import Left, ServerLost
from stratbench.extensions.servers.wire.transport import rendezvous_file

#: A worker without a free slot asks again after a second, two, four, ..., and then this many, at random.
MAX_PAUSE_S = 30.0
#: For how long a worker looks for servers of which none answers.
SILENCE_S = 60.0
#: Maximum time of an attempt to join: between two the worker checks whether the run is over.
ATTEMPT_S = 3.0
#: A worker that is asked to leave first ends its batch, if that takes no longer.
BATCH_S = 2.0
_RETRY_S = 0.5

Work = Ticket | Evaluation | None


class RunOver(Exception):
    """The run was over before this worker could join it."""


class ReturningChannel:
    """A `Channel` to the current incarnation of the servers; other methods are delegated to it.

    If the servers are lost, it looks for the next incarnation, whose first ticket then replaces the awaited
    one. A push in progress is lost then: another worker computes its ticket again. When `leaving` is set, the
    channel leaves after the current batch, or before its end if that takes longer than BATCH_S. Later calls
    raise Left.
    """

    #: No worker evaluates at the end: each epoch was evaluated during the training.
    evaluator = None

    def __init__(
        self,
        connect: Callable[[int], Channel],
        rendezvous: str | Path,
        folder: str | Path,
        leaving: threading.Event,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Join the run.

        Args:
            connect: Makes a channel to an incarnation of the servers.
            rendezvous: Path of the servers' rendezvous files, without their endings.
            folder: The servers' folder, in which they write that the run is over.
            leaving: Set when this worker must leave.
            silence_s: Time without an answer after which the servers are lost.

        Raises:
            RunOver: If the run is over.
            ServerLost: If no server answers.
            Left: If `leaving` is set meanwhile.
        """
        self._connect, self._silence_s = connect, silence_s
        self._rendezvous, self._folder = rendezvous_file(rendezvous, 0), folder
        self._leaving = leaving
        self._channel: Channel | None = None
        self._waited_s, self._moved = 0.0, [0]
        self._joined_incarnation: int | None = None
        self.returns = 0  # changes to another incarnation of the servers
        self.left = False
        if not self._join():
            raise RunOver("the run is over")
        threading.Thread(target=self._leave_in_time, daemon=True).start()

    def __getattr__(self, name: str):
        return getattr(self._channel, name)

    # --- joining -------------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Knock until an incarnation of the servers lets this worker in.

        False: the run is over.
        """
        heard, pause_s = time.monotonic(), 1.0
        while not self._leaving.is_set():
            if read_end(self._folder) is not None:
                return False
            incarnation = None
            try:
                incarnation = self._incarnation()
                self._channel = self._connect(incarnation)
                self._joined_incarnation = incarnation
                if not self._leaving.is_set():
                    return True
                self._channel.leave()  # `_leave_in_time` may have left the one before
            except JoinLater as later:
                print(f"no place yet: {later}", flush=True)
                heard = time.monotonic()
                self._leaving.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except (OSError, ValueError) as error:
                # A server of the lost incarnation may still be there, and reject a worker that it knows.
                if isinstance(error, JoinRefused) and incarnation != self._joined_incarnation:
                    raise
                if time.monotonic() - heard > self._silence_s:
                    raise ServerLost(f"no server for {self._silence_s:g} s: {error}") from None
                self._leaving.wait(_RETRY_S)
        self.left = True
        raise Left("this worker was asked to leave")

    def _incarnation(self) -> int:
        return int(json.loads(self._rendezvous.read_text(encoding="utf-8"))["incarnation"])

    def _retire(self) -> None:
        """Close the channel to lost servers, and keep its measurements."""
        self._waited_s, self._moved = self.wait_s, self.moved_bytes
        self._channel.count_anew()
        self._channel.close()

    # --- what the worker calls -------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """See Channel; over all incarnations."""
        return self._waited_s + self._channel.wait_s

    @property
    def moved_bytes(self) -> list[int]:
        """See Channel; over all incarnations."""
        current = self._channel.moved_bytes
        before = self._moved if len(self._moved) == len(current) else [0] * len(current)
        return [a + b for a, b in zip(before, current, strict=True)]

    def first(self) -> Work:
        """See Channel.first; None also where the run ended meanwhile."""
        return self._persist(Channel.first)

    def push_pull(self) -> Work:
        """See Channel.push_pull."""
        return self._persist(Channel.push_pull)

    def score(self, figures: dict[str, float | None]) -> Work:
        """See Channel.score."""
        return self._persist(lambda channel: channel.score(figures))

    def rehearse(self) -> None:
        """See Channel.rehearse.

        If servers are lost, the rest of the warm-up's exchange is skipped.
        """
        try:
            self._channel.rehearse()
        except ServerLost as lost:
            self._go_on_after(lost)

    def _persist(self, do: Callable[[Channel], Work]) -> Work:
        while True:
            try:
                work = do(self._channel)
                if self._leaving.is_set() and work is not None:
                    self._channel.leave()
                    raise Left("this worker was asked to leave")
                return work
            except ServerLost as lost:
                if not self._go_on_after(lost):
                    return None
                do = Channel.first
            except Left:
                self.left = True
                raise

    def _go_on_after(self, lost: ServerLost) -> bool:
        """Join the next incarnation of the servers; False: the run is over."""
        print(f"{lost}; looking for their next incarnation", flush=True)
        self._retire()
        self.returns += 1
        return self._join()

    def _leave_in_time(self) -> None:
        self._leaving.wait()
        time.sleep(BATCH_S)
        self._channel.leave()

    def close(self) -> None:
        """See Channel.close."""
        self._channel.close()
