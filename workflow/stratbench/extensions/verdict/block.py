"""Runs a block: short trainings (segments) of several strategies in turn on the same devices.

python -m stratbench.extensions.verdict.block --block JSON --settings JSON --data DIR --out DIR --logs DIR

Each segment has processes of its own. If a segment runs out of memory, reaches its time limit or diverges,
this is its result, and the strategy runs no further segments. Exit code 0: all segments ran, and block.json
is complete. Exit code 1: a segment failed for another reason. Its log folder has the evidence, and the whole
block has to be repeated.
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
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from stratbench.cell import record, software_gpu
from stratbench.cell.files import write_text_atomically
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.verdict import block_rules, blocks
from stratbench.extensions.verdict.blocks import BURN_IN, FIRST, MIRROR, THIRD, BlockPlan, Segment
from stratbench.strategies import get_strategy_class, make_strategy
from stratbench.strategies.needs import check_installed
from stratbench.study.job_values import insert_job_values
from stratbench.telemetry.compiling import missing_compiler_reason
from stratbench.train import agent, assemble, gpu_locks
from stratbench.train.forkserver import FOLDER_VARIABLE, run_fork_server
from stratbench.train.inputs import check_code_and_data
from stratbench.train.job import Job
from stratbench.train.launch import (
    Failure,
    create_job,
    create_launcher_parser,
    run_launcher,
    truncate_launcher_log,
)
from stratbench.train.locks import lock_cell
from stratbench.train.running.runner import create_runner

#: Number of steps after the timed ones, for strategies with parameter servers. Without these steps, a worker
#: could run out of batches before the servers have received the last timed push.
TAIL_STEPS = 3


def main(argv: list[str] | None = None) -> int:
    """Run a block and return the exit code."""
    args = parse_arguments(argv)
    plan = BlockPlan.from_dict(json.loads(args.block))
    settings = {name: Settings(**s) for name, s in json.loads(args.settings).items()}
    begun = f"block {plan}: {', '.join(plan.order)}"
    run = BlockRun(args, plan, settings)

    def run_block_under_locks(locks: ExitStack) -> None:
        locks.enter_context(lock_cell(args.logs))
        # Workers of an earlier, killed launcher may still run. Each holds its lock until it ends.
        for log in args.logs.glob("*/workers.lock"):
            with lock_cell(log.parent):
                pass
        truncate_launcher_log(args.logs, begun)
        run.run_all_segments()

    return run_launcher(plan, begun, args.parent, run_block_under_locks, lambda: run.logs)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line of a block's job."""
    parser = create_launcher_parser(__doc__)
    parser.add_argument("--block", required=True, help="plan of the block, as JSON")
    parser.add_argument(
        "--out", required=True, type=Path, help="folder to write block.json and records to"
    )
    return parser.parse_args(insert_job_values(sys.argv[1:] if argv is None else argv))


class BlockRun:
    """A running block: its plan, and the values that its segments have determined so far."""

    def __init__(
        self, args: argparse.Namespace, plan: BlockPlan, settings: Mapping[str, Settings]
    ) -> None:
        self._args, self._plan, self._settings = args, plan, settings
        self.logs: Path = args.logs
        self._steps, self._discard = plan.steps, plan.discarded_steps
        self._slot = 0
        self._preceding: str | None = None
        self._hosts: set[str] = set()
        self._gpu_names: set[str] = set()
        self._use_cuda = False

    def run_all_segments(self) -> None:
        """Run all segments of the block, and write block.json."""
        args, plan = self._args, self._plan
        out = args.out / blocks.BLOCK_FILE
        out.unlink(missing_ok=True)
        shutil.rmtree(args.out / "segments", ignore_errors=True)
        for old in (*args.logs.glob(f"*/{record.FAILURE_FILE}"), args.logs / record.FAILURE_FILE):
            old.unlink(missing_ok=True)
        # All strategies have the same data and devices, so the settings of any strategy name these.
        any_settings = self._settings[plan.order[0]]
        for name in plan.order:
            s = self._settings[name]
            check_installed(name, get_strategy_class(s.strategy), s.options)
        check_code_and_data(args.data, any_settings)
        with gpu_locks.reserve_cell_gpus(any_settings, args.nodes) as self._use_cuda:
            # The block's duration does not include the wait for its devices.
            started, begun_s = (
                datetime.now(UTC),
                time.monotonic(),
            )
            if any_settings.compile and (reason := missing_compiler_reason(self._use_cuda)):
                raise gpu_locks.DeviceError(reason)
            with self._share_fork_server():
                done = run_segments_in_order(plan, self._run_segment, self._choose_segment_length)
        # From here on, a stop signal is ignored: it would discard the results of all segments.
        agent.handle_stop_signals(lambda _: None)
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
                "disagreement": get_segment_disagreement_limit(
                    plan, compute_log_ratios_of_segment_times(done).values()
                ),
            },
            "segments": [segment.as_dict() for segment in done],
            "hosts": sorted(self._hosts),
            "device": "cuda" if self._use_cuda else "cpu",
            "gpu_names": sorted(self._gpu_names),
            "software_gpu": self._use_cuda and software_gpu.is_software_gpu_installed(),
            "allocation": os.environ.get("SLURM_JOB_ID"),
            "started": started.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu_seconds": plan.gpus * wall_s,
            "trained": {
                name: blocks.remove_length_and_seed(self._settings[name]) for name in plan.order
            },
        }
        write_text_atomically(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"block {plan}: {len(done)} segments in {wall_s:.0f} s", flush=True)

    @contextmanager
    def _share_fork_server(self) -> Iterator[None]:
        """Context in which all segments fork their processes from one server.

        The server imports PyTorch once for all segments.
        """
        if self._args.nodes > 1:
            yield
            return
        with run_fork_server(may_share=not self._use_cuda) as path:
            before = os.environ.get(FOLDER_VARIABLE)
            os.environ[FOLDER_VARIABLE] = str(path.parent)
            try:
                # This waits until the fork server has imported PyTorch.
                with run_fork_server(may_share=True):
                    pass
                yield
            finally:
                os.environ.pop(FOLDER_VARIABLE)
                if before is not None:
                    os.environ[FOLDER_VARIABLE] = before

    def _choose_segment_length(self, segment: Segment) -> None:
        """Set the numbers of steps and discarded steps per segment, unless the plan sets them.

        The times of the burn-in segment decide the number of steps.
        """
        if self._steps is None:
            noise = block_rules.STEP_NOISE["cuda" if self._use_cuda else "cpu"]
            self._steps = block_rules.choose_segment_steps(
                segment.start_s, segment.mean_step_s, *noise
            )
        if self._discard is None:
            self._discard = block_rules.count_discarded_steps(self._steps)

    def _run_segment(self, pass_name: str, strategy: str) -> Segment:
        """Run one segment, write its record, and return its result.

        Raises:
            Failure: The segment ended with an error, or lost a worker.
        """
        args, plan = self._args, self._plan
        cell, slot = plan.make_segment_cell(strategy), self._slot
        name = f"{slot:02d}-{strategy}"
        self._slot += 1
        self.logs = args.logs / name
        settings, discarded, timed = self._choose_settings_and_step_counts(strategy)
        RunFolder.from_log_dir(self.logs).create_empty_folder()
        runner = create_runner(settings)
        begun_s = time.monotonic()
        with create_job(cell, settings, self._use_cuda, args, self.logs, in_block=True) as job:
            job, exits, ending = runner.run(job, args)
        wall_s = time.monotonic() - begun_s
        if ending.status == "error":
            raise Failure(f"segment {name}: {ending.reason}", exits.processes)
        if lost := runner.list_lost_workers(job):
            raise Failure(
                f"segment {name}: worker {lost[0]['worker']} was lost: {lost[0]['reason']}"
            )
        made = assemble.make_record(job, ending)
        steps = make_timed_steps_entry(job, discarded, timed) if ending.status == "ok" else None
        made["block"] = {
            "id": plan.relative_path,
            "host": ", ".join(self._record_devices_and_return_hosts(job)),
            "pass": pass_name,
            "slot": slot,
            "preceding": self._preceding,
        }
        if steps is not None:
            made["steps"] = steps
        path = Path("segments", name, "record.json")
        record.write_record(args.out / path, made)
        self._preceding = strategy
        mean_s = steps and steps["mean_s"]
        text = f"{1e3 * mean_s:.2f} ms per step" if mean_s else f"{ending.status}: {ending.reason}"
        print(f"segment {name} ({pass_name}): {text}; {wall_s:.1f} s", flush=True)
        return Segment(
            slot,
            pass_name,
            strategy,
            ending.status,
            mean_s,
            steps and pstdev(steps["each_ms"]) / fmean(steps["each_ms"]),
            str(path),
            wall_s - (made["time"]["train_time_s"] or 0.0),
            wall_s,
        )

    def _choose_settings_and_step_counts(self, strategy_name: str) -> tuple[Settings, int, int]:
        """Return a segment's settings, and its numbers of discarded and of timed steps."""
        timed = self._steps or block_rules.MIN_STEPS
        discarded = (
            block_rules.count_discarded_steps(timed) if self._discard is None else self._discard
        )
        s = self._settings[strategy_name]
        strategy = make_strategy(s.strategy, s.options)
        discarded, timed = strategy.choose_discarded_and_timed_steps(discarded, timed)
        tail = TAIL_STEPS if strategy.kind == "server" else 0
        return (
            blocks.make_segment_settings(s, self._plan, discarded + timed + tail),
            discarded,
            timed,
        )

    def _record_devices_and_return_hosts(self, job: Job) -> list[str]:
        """Add the hosts and GPUs of a segment to the block's, and return its hosts."""
        workers = job.folder.read_worker_results(job.world_size).values()
        provenances = [w["provenance"] for w in workers if "provenance" in w]
        hosts = sorted({p["host"]["name"] for p in provenances})
        self._gpu_names.update(p["gpu"]["name"] for p in provenances if "gpu" in p)
        self._hosts.update(hosts)
        return hosts


def run_segments_in_order(
    plan: BlockPlan,
    run_segment: Callable[[str, str], Segment],
    after_burn_in: Callable[[Segment], None],
) -> list[Segment]:
    """Run a block's segments, and return them in the order in which they ran.

    A burn-in segment comes first. If it fails, the next strategy runs it. Then each strategy runs a segment
    in the plan's order, and another one in the reverse order. A strategy runs a third segment if its two
    segments disagree. A strategy whose segment fails runs no further segments.

    Args:
        plan: Plan of the block.
        run_segment: Runs a segment, given the name of the pass and the strategy.
        after_burn_in: Called with the completed burn-in segment.
    """
    done: list[Segment] = []
    dropped: set[str] = set()

    def run_one_segment(pass_name: str, strategy: str) -> Segment:
        done.append(segment := run_segment(pass_name, strategy))
        if segment.status != "ok":
            dropped.add(strategy)
        return segment

    for strategy in plan.order:
        if (segment := run_one_segment(BURN_IN, strategy)).status == "ok":
            after_burn_in(segment)
            break
    for pass_name, order in ((FIRST, plan.order), (MIRROR, plan.order[::-1])):
        for strategy in order:
            if strategy not in dropped:
                run_one_segment(pass_name, strategy)
    differences = compute_log_ratios_of_segment_times(done)
    for strategy in plan.order:
        if differences.get(strategy, 0.0) > get_segment_disagreement_limit(
            plan, differences.values()
        ):
            run_one_segment(THIRD, strategy)
    return done


def compute_log_ratios_of_segment_times(segments: Sequence[Segment]) -> dict[str, float]:
    """Return the absolute log time ratio of each strategy's two segments, by strategy.

    The result has only strategies whose two segments both ended well.
    """
    times: dict[str, list[float]] = {}
    for s in segments:
        if s.pass_name in (FIRST, MIRROR) and s.mean_step_s is not None:
            times.setdefault(s.strategy, []).append(s.mean_step_s)
    return {name: abs(math.log(t[0] / t[1])) for name, t in times.items() if len(t) == 2}


def get_segment_disagreement_limit(plan: BlockPlan, log_differences: Iterable[float]) -> float:
    """Return the log time ratio of two segments above which a strategy runs a third.

    Args:
        plan: Plan of the block, which may have set the limit.
        log_differences: Absolute log time ratio of each strategy's two segments.
    """
    if plan.disagreement_limit is not None:
        return plan.disagreement_limit
    return block_rules.compute_segment_disagreement_limit(list(log_differences))


def make_timed_steps_entry(job: Job, num_discarded: int, num_timed: int) -> dict[str, Any]:
    """Return the entry `steps` of a segment's record: the time of each timed step.

    The times are those of the slowest process. With parameter servers, a step is as many pushes as one global
    batch has.

    Args:
        job: The segment's job.
        num_discarded: Number of steps before the timed ones.
        num_timed: Number of timed steps.
    """
    each = create_runner(job.settings).read_step_times_s(job)
    slowest = max((times_s[num_discarded : num_discarded + num_timed] for times_s in each), key=sum)
    return {
        "discarded": num_discarded,
        "timed": len(slowest),
        "mean_s": fmean(slowest),
        "each_ms": [1e3 * s for s in slowest],
    }


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # Threads of libraries must not delay the exit.
