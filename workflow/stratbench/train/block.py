"""The block: runs short segments of several strategies one after the other, on the same devices.

    python -m stratbench.train.block --block JSON --settings JSON --data DIR --out DIR --logs DIR

Each segment is a fresh set of processes. Out of memory, a time limit and divergence are results: the
strategy drops out of the rest of the block. Exit code 0: block.json is written, last of all. Exit code
1: a segment failed; its evidence is kept in its log folder, and the block is to be repeated whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, pstdev

from stratbench.cell import block_rules, blocks, record, software_gpu
from stratbench.cell.blocks import BlockPlan, Segment
from stratbench.cell.files import write_atomic
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.strategies import strategy_class
from stratbench.strategies.needs import check_installed
from stratbench.telemetry.compiling import missing_compiler
from stratbench.train import agent, assemble, gpu_locks
from stratbench.train.block_segments import (
    TAIL_STEPS,
    differences_of,
    limit,
    run_in_order,
    timed_steps,
)
from stratbench.train.forkserver import FOLDER_VARIABLE, fork_server
from stratbench.train.job import workers_on_nodes
from stratbench.train.launch import (
    Failure,
    begin_log,
    check_inputs,
    hold_devices,
    job_of,
    launch,
    launchers_parser,
    run_to_end,
)
from stratbench.train.locks import hold_cell


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
    """The block's command line."""
    parser = launchers_parser(__doc__)
    parser.add_argument("--block", required=True, help="the block's plan, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="folder of block.json and segments")
    return parser.parse_args(argv)


class BlockRun:
    """One block as it runs: where it is, and what it has found."""

    def __init__(
        self, args: argparse.Namespace, plan: BlockPlan, settings: Mapping[str, Settings]
    ) -> None:
        self._args, self._plan, self._settings = args, plan, settings
        self.logs: Path = args.logs
        self.at = "before its first segment"
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
        on_nodes = workers_on_nodes(plan.gpus, args.nodes)
        with hold_devices(any_settings, len(on_nodes)) as self._use_cuda:
            started, begun_s = datetime.now(UTC), time.monotonic()  # after the wait for devices
            if any_settings.compile and (reason := missing_compiler(self._use_cuda)):
                raise gpu_locks.DeviceError(reason)
            with self._shared_import():
                done = run_in_order(plan, self._run_segment, self._burnt_in)
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
        if self._args.nodes != 1:
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

    def _burnt_in(self, segment: Segment) -> None:
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
        self.logs, self.at = args.logs / name, f"segment {name}"
        timed = self._steps or block_rules.LEAST_STEPS
        discarded = block_rules.discarded_steps(timed) if self._discard is None else self._discard
        s = self._settings[strategy]
        cls = strategy_class(s.strategy)
        discarded, timed = cls(cls.Options(**s.options)).own_length(discarded, timed)
        tail = TAIL_STEPS if cls.kind == "server" else 0
        settings = blocks.segment_settings(s, plan, discarded + timed + tail)
        RunFolder.of_logs(self.logs).create()
        begun_s = time.monotonic()
        with job_of(cell, settings, self._use_cuda, args, self.logs, in_block=True) as job:
            exits, ending = launch(job, args.cpus_per_node)
        wall_s = time.monotonic() - begun_s
        if ending.status == "error":
            raise Failure(f"{self.at}: {ending.reason}", exits.processes)
        if lost := [w for s in job.folder.read_servers(job.n_servers) for w in s.get("lost", ())]:
            raise Failure(f"{self.at}: worker {lost[0]['worker']} was lost: {lost[0]['reason']}")
        made = assemble.make_record(job, ending)
        steps = timed_steps(job, discarded, timed) if ending.status == "ok" else None
        provenances = [
            w["provenance"]
            for w in job.folder.read_workers(job.world_size).values()
            if "provenance" in w
        ]  # a worker that told nothing has none
        hosts = sorted({p["host"]["name"] for p in provenances})
        self._gpu_names.update(p["gpu"]["name"] for p in provenances if "gpu" in p)
        made["block"] = {
            "id": plan.path,
            "host": ", ".join(hosts),
            "pass": in_pass,
            "slot": slot,
            "preceding": self._preceding,
        }
        if steps is not None:
            made["steps"] = steps
        path = Path("segments", name, "record.json")
        record.write(args.out / path, made)
        self._hosts.update(hosts)
        self._preceding = strategy
        self.at = "between its segments"
        mean_s = steps and steps["mean_s"]
        text = f"{1e3 * mean_s:.2f} ms a step" if mean_s else f"{ending.status}: {ending.reason}"
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


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # as a cell's launcher does
