"""How long synchronous elastic workers stop when one joins or leaves: torchrun's own restart, and ours.

    PYTHONPATH=workflow python benchmarks/elastic_pause.py

Writes results/elastic/pause.csv and pause.md; some eight minutes. `--only ours` measures ours alone, and
keeps the rest of pause.csv.

Ours: an elastic cell of `ddp` on this host, two workers, whose second leaves by SIGTERM or SIGKILL, again and
again; another comes in its place, imports and warms up while the first one trains, and then joins.

torchrun's: Two agents of `torchrun --nnodes=1:3` on this
host, one CPU process each, all-reduce by gloo, a model of nothing. The second joins, and leaves by SIGTERM or
SIGKILL, again and again. The pause is the time without a step: from the last step before the change to the
first one after it. So it holds the launcher, the rendezvous and the imports; a cluster adds its data, its
weights and its GPUs' start. A third place stays free, as for workers that still wait in the queue: then a
rendezvous waits for `last_call_timeout`, 30 s by default.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is needed: without it PyTorch 2.13 never tells one that joins late the
address of the store (`next_rendezvous` keeps the first round's), and after 60 s all fail.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.workload.data.prepare import prepare

OUT = Path(__file__).parent / "results" / "elastic"
#: torchrun's default is 30: how long a rendezvous that has the least number of nodes waits for more.
LAST_CALLS_S = (30, 1)
#: How long a state lasts before it is changed, in steps of `STEP_S`.
STEPS, STEP_S = 20, 0.05


def worker(log: str) -> None:
    """Steps for ever; each is written with its time and the number of workers."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with open(log, "a", encoding="utf-8", buffering=1) as file:
        while True:
            dist.all_reduce(torch.ones(1))
            file.write(f"{time.time():.3f} {dist.get_world_size()}\n")
            time.sleep(STEP_S)


def agent(port: int, last_call_s: int, is_host: bool, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=pause"]
    conf = f"is_host={int(is_host)},last_call_timeout={last_call_s}"
    command += [f"--rdzv-conf={conf}", "--max-restarts=100", __file__, "--worker", str(log)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(log.with_suffix(".log"), "ab") as said:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=said, stderr=said
        )


def steps(log: Path) -> list[tuple[float, int]]:
    """The time and the number of workers of each step."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines()
    return [
        (float(at), int(world)) for at, world in (line.split() for line in lines if " " in line)
    ]


def wait_for(what: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened for {seconds:g} s")
        time.sleep(0.05)


def pause(log: Path, world: int) -> float:
    """Seconds without a step before the first ones of `world` workers, which are waited for."""
    before = len(steps(log))

    def settled() -> bool:
        return sum(w == world for _, w in steps(log)[before:]) > STEPS

    wait_for(settled)
    found = steps(log)
    first = next(i for i, (_, w) in enumerate(found) if i >= before and w == world)
    return found[first][0] - found[first - 1][0]


def end(process: subprocess.Popen, how: int) -> None:
    """Ends an agent; with SIGKILL its workers too, which lead sessions of their own, as SLURM does."""
    with suppress(psutil.NoSuchProcess):
        started = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        for each in started if how == signal.SIGKILL else started[:1]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(how)
        for each in psutil.wait_procs(started, 30)[1]:
            each.kill()
    process.wait()


def rounds(last_call_s: int, number: int, folder: Path) -> Iterator[tuple[str, float]]:
    """The pause of each change."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    log = folder / f"steps-{last_call_s}.txt"  # of the first agent's worker
    first = agent(port, last_call_s, True, log)
    second = None
    try:
        wait_for(lambda: len(steps(log)) > STEPS)
        for i in range(number):
            second = agent(port, last_call_s, False, folder / "other.txt")
            yield "join", pause(log, 2)
            how = (signal.SIGTERM, signal.SIGKILL)[i % 2]
            end(second, how)
            yield f"leave by {how.name}", pause(log, 1)
    finally:
        for process in (second, first):
            if process is not None:
                end(process, signal.SIGTERM)


def ours(number: int, folder: Path) -> Iterator[tuple[str, float]]:
    """The pause of each change in an elastic cell, as its coordinator keeps it."""
    from launching import settings

    s = settings("ddp", gpus=2, per_worker_batch=8, elastic=True, epochs=10**6, lr=1e-6)
    s = replace(s, slowdown={"workers": [0, 1], "factor": 10})
    cell = Cell("pause", "tiny", "ddp", s.model, s.dataset, 2, 0)
    prepare("tiny", folder / "data", spec=s.data_spec)
    logs = cell.log_dir(folder)
    command = [sys.executable, "-m", "stratbench.train.launch", "--cell", json.dumps(asdict(cell))]
    command += ["--settings", s.as_json(), "--data", str(folder / "data"), "--logs", str(logs)]
    command += ["--record", str(folder / "record.json"), "--timeline", str(folder / "t.csv")]
    with open(folder / "launcher.log", "ab") as said:
        launcher = subprocess.Popen(command, stdout=said, stderr=said)
    run = RunFolder.of_logs(logs)
    try:
        for i in range(2 * number):
            wait_for(lambda: together(run))
            last = max(generations(run)[-1]["members"])
            entries = map(json.loads, run.worker_jobs.read_text(encoding="utf-8").splitlines())
            pid = next(int(e["id"]) for e in entries if e["number"] == last)
            os.kill(pid, (signal.SIGTERM, signal.SIGKILL)[i % 2])
            wait_for(lambda n=last: n not in generations(run)[-1]["members"])
        wait_for(lambda: together(run))
    finally:
        launcher.terminate()
        launcher.wait()
    for g in generations(run):
        if g["pause_s"] is not None:
            kinds = {"joined": "join", "left": "leave by SIGTERM"}
            yield kinds.get(g["cause"].rpartition(" ")[2], "leave by SIGKILL"), g["pause_s"]


def generations(run: RunFolder) -> list[dict[str, Any]]:
    """Who has trained together so far."""
    return [
        g for p in run.lives() for g in json.loads(p.read_text(encoding="utf-8"))["generations"]
    ]


def together(run: RunFolder) -> bool:
    """Whether two train now."""
    last = generations(run)[-1:]
    return any(len(g["members"]) == 2 and g["began_unix_s"] is not None for g in last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["ours"], help="keep what pause.csv has of torchrun")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
        return
    import torch

    rows = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if given.only:
            with open(given.out / "pause.csv", newline="", encoding="utf-8") as file:
                kept = [r for r in csv.DictReader(file) if r["last_call_s"] != "ours"]
                rows += [r | {"pause_s": float(r["pause_s"])} for r in kept]
        for change, pause_s in ours(given.rounds, Path(folder)):
            rows.append({"last_call_s": "ours", "change": change, "pause_s": round(pause_s, 3)})
            print(rows[-1], flush=True)
        for last_call_s in () if given.only else LAST_CALLS_S:
            for change, pause_s in rounds(last_call_s, given.rounds, Path(folder)):
                rows.append(
                    {"last_call_s": last_call_s, "change": change, "pause_s": round(pause_s, 2)}
                )
                print(rows[-1], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    with open(given.out / "pause.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "# What a joining or leaving worker costs the others",
        "",
        f"Made by `benchmarks/elastic_pause.py`: PyTorch {torch.__version__}, gloo, {os.cpu_count()} CPU",
        f"cores, load average {load:.1f} at the start. Seconds without a step, no GPU. torchrun's hold",
        "launcher, rendezvous and imports, by its `last_call_timeout`; ours the rendezvous and the state,",
        "since a new worker imports and warms up while the others train.",
        *["torchrun's rows are of an earlier run on the same machine."] * bool(given.only),
        "",
        "| who, with which last_call_timeout | change | n | median, s | range, s |",
        "|--:|---|--:|--:|---|",
    ]
    for key in dict.fromkeys((r["last_call_s"], r["change"]) for r in rows):
        found = [r["pause_s"] for r in rows if (r["last_call_s"], r["change"]) == key]
        who = "this project" if key[0] == "ours" else f"torchrun, {key[0]} s"
        lines.append(
            f"| {who} | {key[1]} | {len(found)} | "
            f"{statistics.median(found):.2g} | {min(found):.2g} to {max(found):.2g} |"
        )
    (given.out / "pause.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
