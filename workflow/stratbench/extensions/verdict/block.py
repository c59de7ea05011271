"""The block: runs short segments of several strategies in turn on the same devices.

python -m stratbench.extensions.verdict.block --block JSON --settings JSON --data DIR --out DIR --logs DIR

Each segment is a fresh set of processes. Out of memory, a time limit and divergence are results: the strategy
drops out of the rest of the block. Exit code 0: block.json is written, last of all. Exit code 1: a segment
failed; its evidence is in its log folder, and the whole block is to be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from stratbench.cell import record, software_gpu
from stratbench.cell.files import write_atomic
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.verdict import block_rules, blocks
from stratbench.extensions.verdict.blocks import BURN_IN, FIRST, MIRROR, THIRD, BlockPlan, Segment
from stratbench.strategies import make_strategy, strategy_class
from stratbench.strategies.needs import check_installed
from stratbench.study.job_values import insert_values
from stratbench.telemetry.compiling import missing_compiler
from stratbench.train import agent, assemble, gpu_locks
from stratbench.train.forkserver import FOLDER_VARIABLE, fork_server
from stratbench.train.inputs import check_inputs
from stratbench.train.job import Job
from stratbench.train.launch import (
    Failure,
    begin_log,
    job_of,
    launchers_parser,
    run_to_end,
)
from stratbench.train.locks import hold_cell
from stratbench.train.running.runner import runner_of

#: Steps after those that are timed, of a strategy with servers: until the last timed push has come, no
#: worker may run out of tickets.
TAIL_STEPS = 3


def main(argv: list[str] | None = None) -> int:
    """Run the block; returns the exit code."""
    args = parse_arguments(argv)
    plan = BlockPlan.from_dict(json.loads(args.block))
    settings = {name: Settings(**s) for name, s in json.loads(args.settings).items()}
    begun = f"block {plan}: {', '.join(plan.order)}"
    run = BlockRun(args, plan, settings)

    def train(held: ExitStack) -> None:
        held.enter_context(hold_cell(args.logs))
        for log in args.logs.glob("*/workers.lock"):  # of a launcher that was killed
            with hold_cell(log.parent):
                pass
        begin_log(args.logs, begun)
        run.run()

    return run_to_end(plan, begun, args.parent, train, lambda: run.logs)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the block's command line."""
    parser = launchers_parser(__doc__)
    parser.add_argument("--block", required=True, help="the block's plan, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="folder of block.json and segments")
    return parser.parse_args(insert_values(sys.argv[1:] if argv is None else argv))


class BlockRun:
    """One block as it runs, and what is known of it so far."""

    def __init__(
        self, args: argparse.Namespace, plan: BlockPlan, settings: Mapping[str, Settings]
    ) -> None:
        self._args, self._plan, self._settings = args, plan, settings
        self.logs: Path = args.logs
        self._steps, self._discard = plan.steps, plan.discard
        self._slot = 0
        self._preceding: str | None = None
        self._hosts: set[str] = set()
        self._gpu_names: set[str] = set()
        self._use_cuda = False

    def run(self) -> None:
        """Run all segments and write block.json."""
        args, plan = self._args, self._plan
        out = args.out / blocks.BLOCK_FILE
        out.unlink(missing_ok=True)
        shutil.rmtree(args.out / "segments", ignore_errors=True)
        for old in (*args.logs.glob(f"*/{record.FAILURE_FILE}"), args.logs / record.FAILURE_FILE):
            old.unlink(missing_ok=True)
        any_settings = self._settings[plan.order[0]]  # all are of one experiment, model and number
        for name in plan.order:
            s = self._settings[name]
            check_installed(name, strategy_class(s.strategy), s.options)
        check_inputs(args.data, any_settings)
        with gpu_locks.hold_devices(any_settings, args.nodes) as self._use_cuda:
            started, begun_s = datetime.now(UTC), time.monotonic()  # after the wait for devices
            if any_settings.compile and (reason := missing_compiler(self._use_cuda)):
                raise gpu_locks.DeviceError(reason)
            with self._shared_import():
                done = run_in_order(plan, self._run_segment, self._choose_length)
        agent.on_signals(lambda _: None)  # what is as good as finished is not given up
        wall_s = time.monotonic() - begun_s
        result = {
            "schema_version": blocks.SCHEMA_VERSION,
            **{
                key: getattr(plan, key)
                for key in ("study", "experiment", "model", "dataset", "gpus")
            },
            "block": plan.block,
            "seed": plan.seed,
            "order": list(plan.order),
            "settings": {
                "steps": self._steps,
                "discard": self._discard,
                "disagreement": limit(plan, differences_of(done).values()),
            },
            "segments": [segment.as_dict() for segment in done],
            "hosts": sorted(self._hosts),
            "device": "cuda" if self._use_cuda else "cpu",
            "gpu_names": sorted(self._gpu_names),
            "software_gpu": self._use_cuda and software_gpu.is_here(),
            "allocation": os.environ.get("SLURM_JOB_ID"),
            "started": started.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu_seconds": plan.gpus * wall_s,
            "trained": {name: blocks.trained_with(self._settings[name]) for name in plan.order},
        }
        write_atomic(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"block {plan}: {len(done)} segments in {wall_s:.0f} s", flush=True)

    @contextmanager
    def _shared_import(self) -> Iterator[None]:
        """Let the segments share a fork server, which imports PyTorch before the first one."""
        if self._args.nodes > 1:
            yield
            return
        with fork_server(may_share=not self._use_cuda) as path:
            before = os.environ.get(FOLDER_VARIABLE)
            os.environ[FOLDER_VARIABLE] = str(path.parent)
            try:
                with fork_server(may_share=True):  # comes back when it has been imported
                    pass
                yield
            finally:
                os.environ.pop(FOLDER_VARIABLE)
                if before is not None:
                    os.environ[FOLDER_VARIABLE] = before

    def _choose_length(self, segment: Segment) -> None:
        """Choose the length of the segments from the burn-in, where the plan has not."""
        if self._steps is None:
            noise = block_rules.STEP_NOISE["cuda" if self._use_cuda else "cpu"]
            self._steps = block_rules.segment_steps(segment.start_s, segment.mean_step_s, *noise)
        if self._discard is None:
            self._discard = block_rules.discarded_steps(self._steps)

    def _run_segment(self, in_pass: str, strategy: str) -> Segment:
        """Run one segment and write its record. Raises Failure if it failed."""
        args, plan = self._args, self._plan
        cell, slot = plan.cell(strategy), self._slot
        name = f"{slot:02d}-{strategy}"
        self._slot += 1
        self.logs = args.logs / name
        settings, discarded, timed = self._settings_of_segment(strategy)
        RunFolder.of_logs(self.logs).create()
        begun_s = time.monotonic()
        with job_of(cell, settings, self._use_cuda, args, self.logs, in_block=True) as job:
            job, exits, ending = runner_of(settings).run(job, args)
        wall_s = time.monotonic() - begun_s
        if ending.status == "error":
            raise Failure(f"segment {name}: {ending.reason}", exits.processes)
        if lost := [w for s in job.folder.read_servers(job.n_servers) for w in s.get("lost", ())]:
            raise Failure(
                f"segment {name}: worker {lost[0]['worker']} was lost: {lost[0]['reason']}"
            )
        made = assemble.make_record(job, ending)
        steps = timed_steps(job, discarded, timed) if ending.status == "ok" else None
        made["block"] = {
            "id": plan.path,
            "host": ", ".join(self._note_machines(job)),
            "pass": in_pass,
            "slot": slot,
            "preceding": self._preceding,
        }
        if steps is not None:
            made["steps"] = steps
        path = Path("segments", name, "record.json")
        record.write(args.out / path, made)
        self._preceding = strategy
        mean_s = steps and steps["mean_s"]
        text = f"{1e3 * mean_s:.2f} ms per step" if mean_s else f"{ending.status}: {ending.reason}"
        print(f"segment {name} ({in_pass}): {text}; {wall_s:.1f} s", flush=True)
        return Segment(
            slot,
            in_pass,
            strategy,
            ending.status,
            mean_s,
            steps and pstdev(steps["each_ms"]) / fmean(steps["each_ms"]),
            str(path),
            wall_s - (made["time"]["train_time_s"] or 0.0),
            wall_s,
        )

    def _settings_of_segment(self, strategy: str) -> tuple[Settings, int, int]:
        """Return the settings of a strategy's segment, its discarded and its timed steps."""
        timed = self._steps or block_rules.MIN_STEPS
        discarded = block_rules.discarded_steps(timed) if self._discard is None else self._discard
        s = self._settings[strategy]
        strategy = make_strategy(s.strategy, s.options)
        discarded, timed = strategy.own_length(discarded, timed)
        tail = TAIL_STEPS if strategy.kind == "server" else 0
        return blocks.segment_settings(s, self._plan, discarded + timed + tail), discarded, timed

    def _note_machines(self, job: Job) -> list[str]:
        """Record the nodes and devices of a segment's workers; return their hosts, sorted."""
        workers = job.folder.read_workers(job.world_size).values()
        provenances = [w["provenance"] for w in workers if "provenance" in w]
        hosts = sorted({p["host"]["name"] for p in provenances})
        self._gpu_names.update(p["gpu"]["name"] for p in provenances if "gpu" in p)
        self._hosts.update(hosts)
        return hosts


# ---------------------------------------------------------------- the segments


def run_in_order(
    plan: BlockPlan, run: Callable[[str, str], Segment], after_burn_in: Callable[[Segment], None]
) -> list[Segment]:
    """Run a block's segments, and return them in their order.

    A burn-in comes first, by the first strategy that ends one well. Then every strategy runs in the plan's
    order, in its mirror, and a third time if its first two disagree. A strategy that ends in another way
    drops out of the rest.

    Args:
        plan: The block.
        run: Runs a segment, given the pass and the strategy.
        after_burn_in: Called with the burn-in's segment.
    """
    done: list[Segment] = []
    dropped: set[str] = set()

    def one(in_pass: str, strategy: str) -> Segment:
        done.append(segment := run(in_pass, strategy))
        if segment.status != "ok":
            dropped.add(strategy)
        return segment

    for strategy in plan.order:
        if (segment := one(BURN_IN, strategy)).status == "ok":
            after_burn_in(segment)
            break
    for in_pass, order in ((FIRST, plan.order), (MIRROR, plan.order[::-1])):
        for strategy in order:
            if strategy not in dropped:
                one(in_pass, strategy)
    differences = differences_of(done)
    for strategy in plan.order:
        if differences.get(strategy, 0.0) > limit(plan, differences.values()):
            one(THIRD, strategy)
    return done


def differences_of(segments: Sequence[Segment]) -> dict[str, float]:
    """Return the difference of each strategy's two segments: the log ratio of their times.

    Only strategies whose two segments ended well have one.
    """
    times: dict[str, list[float]] = {}
    for s in segments:
        if s.in_pass in (FIRST, MIRROR) and s.mean_step_s is not None:
            times.setdefault(s.strategy, []).append(s.mean_step_s)
    return {name: abs(math.log(t[0] / t[1])) for name, t in times.items() if len(t) == 2}


def limit(plan: BlockPlan, differences: Iterable[float]) -> float:
    """Return the difference of two segments from which on a strategy runs a third in this block."""
    if plan.disagreement is not None:
        return plan.disagreement
    return block_rules.disagreement_limit(list(differences))


def timed_steps(job: Job, discarded: int, timed: int) -> dict[str, Any]:
    """Return the record's `steps`: the time of each timed step.

    For a collective, these are the slowest worker's. With servers, a step is as many pushes as a global batch
    has, and ends when the slowest server has taken them. A single worker's step does not show the joint rate.

    Args:
        job: The cell's.
        discarded: Number of steps before.
        timed: Number of timed steps.
    """
    if job.has_servers:
        ends = [s["step_ends_s"] for s in job.folder.read_servers(job.n_servers)]
        by_process = [
            [after - before for before, after in pairwise(e[discarded - 1 : discarded + timed])]
            for e in ends
        ]
    else:
        workers = job.folder.read_workers(job.world_size).values()
        by_process = [
            [ms / 1e3 for ms in w["step_ms"][discarded : discarded + timed]] for w in workers
        ]
    slowest = max(by_process, key=sum)
    return {
        "discarded": discarded,
        "timed": len(slowest),
        "mean_s": fmean(slowest),
        "each_ms": [1e3 * s for s in slowest],
    }


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # as a cell's launcher does
