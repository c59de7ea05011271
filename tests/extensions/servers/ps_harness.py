"""Runs parameter servers and workers for the tests, on threads of this process or as processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from process_groups import forking
from torch import nn

from launching import LIMIT_S, until
from stratbench.extensions.servers.policies.policies import parse_policy_options
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.member import Member
from stratbench.extensions.servers.ps.scale import LossScale
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.snapshots import load_snapshot
from stratbench.extensions.servers.ps.tickets import Evaluation, Ticket
from stratbench.extensions.servers.wire.frames import Frame

BATCH = 4
#: Held while torch's one generator is drawn from: workers are threads here.
SEEDED = threading.Lock()
#: How long anything is waited for.
PATIENCE_S = LIMIT_S
#: Of the servers and workers of these tests: they give nobody up before a test does.
DEADLINE_S = 2 * PATIENCE_S
HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
ADAMW = {"optimizer": "adamw", "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with BatchNorm and tensors of odd sizes, equal at every call, from any thread."""
    with SEEDED:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)
        ).to(dtype)


def batch(ticket: Ticket, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The images, shape [BATCH, 1, 6, 6], and labels that a ticket stands for."""
    generator = torch.Generator().manual_seed(ticket.number)
    x = torch.randn(BATCH, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 5, (BATCH,), generator=generator)


def serve_run(config: ServerConfig, secret: bytes) -> dict[str, Any]:
    """Run one server, of an elastic run where the config is of one."""
    if type(config) is ServerConfig:
        return run_server(config, secret)
    from stratbench.extensions.elastic.servers.run import make_elastic_run

    return run_server(config, secret, make_run=make_elastic_run)


def config(folder: Path, **changed: Any) -> ServerConfig:
    """A small run of one worker, one epoch of four steps; AdamW where the policy refuses SGD."""
    refuses_sgd = parse_policy_options(changed.get("policy", "ps-async")).refusal("sgd")
    base = ServerConfig(
        rendezvous=str(folder / "rendezvous"),
        workers=1,
        epochs=1,
        steps_per_epoch=4,
        slices_per_step=1,
        policy="ps-async",
        hyper=ADAMW if refuses_sgd else HYPER,
        shard_bytes=256,
        heartbeat_deadline_s=DEADLINE_S,
        handshake_deadline_s=DEADLINE_S,
        start_deadline_s=DEADLINE_S,
    )
    return replace(base, **changed)


def figures_of(epoch: int) -> dict[str, float]:
    """What every evaluation of an epoch gives: a score that rises by a tenth an epoch."""
    return {"test_loss": 1.0, "score": (epoch + 1) / 10, "score_error": 0.01}


class Served:
    """A server on a thread of this process; `result()` waits for its statistics."""

    def __init__(self, config: ServerConfig, secret: bytes) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(serve_run, config, secret)
        self._pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return self._future.result(timeout_s)


class Worked:
    """A worker on a thread of this process: trains until no tickets are left."""

    def __init__(
        self,
        config: ServerConfig,
        secret: bytes,
        worker: int = 0,
        transport: str = "auto",
        wire: str = "native",
        dtype: torch.dtype = torch.float64,
        before_push: Any = None,
        scaled: bool = False,
        rehearsals: int = 0,
        incarnation: int | None = None,
    ) -> None:
        """`before_push(worker, ticket, channel)` runs on each ticket, after backward.

        `scaled`: the worker has a loss scale, and the gradient whose number `before_push` returns
        overflows. `incarnation`: of the servers of an elastic run.
        """
        self.evaluated: list[int] = []
        self._incarnation = incarnation
        self.tickets: list[Ticket] = []
        self.model = small_model(dtype)
        self.flat = FlatSpace(self.model)
        self.scale = LossScale() if scaled else None
        self.error: Exception | None = None
        self.asked = threading.Event()  # for the initial weights: no other worker will be
        self._args = (config, secret, worker, transport, wire, dtype, before_push, rehearsals)
        self._start_thread = threading.Thread(target=self._run, daemon=True)
        self._start_thread.start()

    def _run(self) -> None:
        config, secret, worker, transport, wire, dtype, before_push, rehearsals = self._args
        try:
            self.channel = self.connect(config, secret, worker, transport, wire)
            send_initial = self.channel._send_initial_tensors
            self.channel._send_initial_tensors = lambda link: (self.asked.set(), send_initial(link))
            try:
                for _ in range(rehearsals):
                    self.flat.grads.fill_(1.0)
                    self.channel.rehearse_exchange()
                ticket = self.channel.wait_for_first_ticket()
                while ticket is not None:
                    if isinstance(ticket, Evaluation):
                        load_snapshot(self.channel.snapshot_dir, ticket.epoch, PATIENCE_S)
                        self.evaluated.append(ticket.epoch)
                        ticket = self.channel.send_evaluation(figures_of(ticket.epoch))
                        continue
                    self.tickets.append(ticket)
                    x, y = batch(ticket, dtype)
                    self.flat.zero_grads()
                    loss = F.cross_entropy(self.model(x), y)
                    (loss * self.scale.value if self.scale else loss).backward()
                    bad = before_push(worker, ticket, self.channel) if before_push else None
                    if bad is not None:
                        self.flat.grads[bad] = float("inf")
                    ticket = self.channel.push_pull()
            finally:
                self.channel.close()
        except Exception as error:
            self.error = error

    def connect(
        self, config: ServerConfig, secret: bytes, worker: int, transport: str, wire: str
    ) -> Channel:
        return Channel.connect(
            config.rendezvous,
            worker,
            self.flat,
            secret,
            transport,
            wire,
            DEADLINE_S,
            self.scale,
            config.n_servers,
            self._incarnation,
        )

    @property
    def running(self) -> bool:
        return self._start_thread.is_alive()

    def join(self, timeout_s: float = PATIENCE_S) -> Worked:
        """Wait for its end; raises what it raised."""
        self._start_thread.join(timeout_s)
        assert not self._start_thread.is_alive(), f"a worker hangs after {self.tickets[-1:]}"
        if self.error is not None:
            raise self.error
        return self


def run_all(
    config: ServerConfig, secret: bytes = b"s" * 32, **kwargs: Any
) -> tuple[dict[str, Any], list[Worked]]:
    """One run with all its workers in this process; server 0's statistics and the workers."""
    servers = [Served(replace(config, server=s), secret) for s in range(config.n_servers)]
    workers = [Worked(config, secret, w, **kwargs) for w in range(config.workers)]
    for worker in workers:
        worker.join()
    results = [server.result() for server in servers]
    return results[0], workers


def single_run(plan_config: ServerConfig, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same training without a server: one process, torch's own optimizer."""
    model = small_model(dtype)
    hyper = dict(plan_config.hyper)
    kind = torch.optim.AdamW if hyper.pop("optimizer", "sgd") == "adamw" else torch.optim.SGD
    optimizer = kind(model.parameters(), **hyper)
    c = plan_config
    for number in range(c.epochs * c.steps_per_epoch * c.slices_per_step):
        x, y = batch(Ticket(number, 0, 0, 0), dtype)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


# --- real processes ------------------------------------------------------------------------------

#: A file: where it is, the servers count as silent for long; with a number behind, that worker does.
#: For as many seconds as stand in it, DEADLINE_S where it is empty.
LATE = "late"
#: A file with a worker's number behind: for how many seconds the server counts it as silent.
SILENT = "silent"
#: A file with a worker's number behind: a pipe from which a worker with `holds_lock` reads.
GATE = "gate"


@dataclass(frozen=True)
class Habits:
    """How a worker process behaves; its tickets are counted from 0."""

    transport: str = "auto"
    step_s: float = 0.0  # time it takes for a step, on top of the computing
    dies_at: int | None = None  # kills itself at its n-th ticket, having pushed half the shards
    #: It stays at its n-th ticket until it is killed or its run has ended.
    stays_at: int | None = None
    #: (worker, n): it stays at its first ticket until that worker has begun n.
    lets_begin: tuple[int, int] | None = None
    beats: int = 0  # it stays at a ticket until so many more heartbeats have left
    spin: bool = False  # it stays there in Python code, which holds the interpreter lock
    #: It stays at its first ticket in C code that keeps the interpreter lock, until its GATE is written to.
    holds_lock: bool = False


def work(config: ServerConfig, secret: bytes, worker: int, habits: Habits, folder: Path) -> None:
    """A worker process: one JSON line for each ticket it begins, and a last one for its end."""
    torch.set_num_threads(1)
    with log_of(folder, worker).open("a", buffering=1) as out:

        def note(**fields: Any) -> None:
            out.write(json.dumps(fields) + "\n")

        model = small_model()
        flat = FlatSpace(model)
        try:
            channel = Channel.connect(
                config.rendezvous,
                worker,
                flat,
                secret,
                habits.transport,
                deadline_s=DEADLINE_S,
                n_servers=config.n_servers,
            )
            beats = note_heartbeats(channel)
            ticket = channel.wait_for_first_ticket()
            begun = 0
            while ticket is not None:
                note(ticket=ticket.number)
                x, y = batch(ticket)
                flat.zero_grads()
                F.cross_entropy(model(x), y).backward()
                time.sleep(habits.step_s)
                stay(habits, begun, channel, beats, folder)
                if habits.holds_lock and begun == 0:
                    gate = os.open(folder / f"{GATE}{worker}", os.O_RDWR)
                    ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)
                if begun == habits.dies_at:
                    channel._prepare_for_reply()
                    channel._push_shards(0, len(channel._bounds) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                begun += 1
                ticket = channel.push_pull()
            channel.close()
            note(end="done", evaluator=channel.evaluator)
        except Exception as error:
            note(end=type(error).__name__, reason=str(error))


def note_heartbeats(channel: Channel) -> list[Frame]:
    """The heartbeats that the channel sends to server 0, as they leave."""
    connection, left = channel._links[0].connection, []
    send = connection.send_unless_busy
    connection.send_unless_busy = lambda *frame: (send(*frame), left.append(frame))
    return left


def stay(habits: Habits, begun: int, channel: Channel, beats: list, folder: Path) -> None:
    """Stay at a worker's ticket number `begun` for as long as its habits say."""
    beats_before = len(beats)

    def stays() -> bool:
        if begun == habits.stays_at:
            return channel._error is None
        if begun == 0 and habits.lets_begin is not None:
            worker, count = habits.lets_begin
            return len(notes_in(folder, worker)) < count
        return len(beats) - beats_before < habits.beats

    while stays():
        if not habits.spin:
            time.sleep(0.01)
        if (folder / LATE).exists():  # as if the servers had last been heard that long ago
            for link in channel._links:
                link.connection.last_heard -= DEADLINE_S
                link.connection._awake.since -= DEADLINE_S


def log_of(folder: Path, worker: int) -> Path:
    return folder / f"worker{worker}.jsonl"


def notes_in(folder: Path, worker: int) -> list[dict[str, Any]]:
    """What worker `worker` has noted so far."""
    path = log_of(folder, worker)
    # The last line may be half written.
    return [json.loads(x) for x in path.read_text().split("\n")[:-1]] if path.exists() else []


def serve_process(config: ServerConfig, secret: bytes, folder: Path) -> None:
    """A server process; its statistics go to `config.stats_path`."""
    silent_s = Member.compute_silence_s

    def silent_for_longer(member: Member, now: float, awake_since: float) -> float:
        more_s = 0.0
        with contextlib.suppress(FileNotFoundError):
            more_s = float((folder / f"{LATE}{member.worker}").read_text() or DEADLINE_S)
        found = silent_s(member, now + more_s, awake_since)
        (folder / f"{SILENT}{member.worker}").write_text(str(found))
        return found

    Member.compute_silence_s = silent_for_longer
    serve_run(config, secret)


class Processes:
    """A run of real processes; `with` kills what is left of it."""

    def __init__(self, folder: Path, config: ServerConfig, habits: list[Habits]) -> None:
        """One worker for each of `habits`."""
        context = forking()
        self.folder = folder
        self._stats = folder / "stats.json"
        secret = os.urandom(32)
        self.config = replace(config, workers=len(habits), stats_path=str(self._stats))
        self.servers = []
        for s in range(config.n_servers):
            own = self.config if s == 0 else replace(self.config, server=s, stats_path=None)
            self.servers.append(context.Process(target=serve_process, args=(own, secret, folder)))
        self.workers = [
            context.Process(target=work, args=(self.config, secret, w, habit, folder))
            for w, habit in enumerate(habits)
        ]

    def __enter__(self) -> Processes:
        for process in self.servers + self.workers:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.servers + self.workers:
            process.kill()
            process.join(5)

    def notes(self, worker: int) -> list[dict[str, Any]]:
        """What worker `worker` has noted so far."""
        return notes_in(self.folder, worker)

    def wait_for_tickets(self, worker: int, count: int) -> None:
        """Wait until a worker has begun `count` tickets."""
        until(lambda: len(self.notes(worker)) >= count, PATIENCE_S)

    def end(self, worker: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for a worker's process to end; its last note."""
        self.workers[worker].join(timeout_s)
        assert not self.workers[worker].is_alive(), f"worker {worker} hangs"
        return self.notes(worker)[-1]

    def statistics(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the servers to end; what server 0 reports."""
        for process in self.servers:
            process.join(timeout_s)
            assert not process.is_alive(), "a server hangs"
        return json.loads(self._stats.read_text())
