"""Stage 7: what the step clock costs, and how much memory it takes over very many steps."""

from __future__ import annotations

import time

import psutil
import torch

from stage import Stage, in_child, median
from stratbench.telemetry.clock import StepClock

PHASES = ("data", "forward", "backward", "server")
EVENTS, BLOCKS, STEPS = 250_000, 8, 50
#: Aims: what phase marks may add to a step; seconds and bytes of the stamps of a long run.
COST, COLLECT_S, EVENT_BYTES = 0.01, 10.0, 4096


def run(stage: Stage) -> None:
    with stage.attempt("marks cost"):
        judge(stage, in_child(stage, ratios_of_blocks, stage.device))
    with stage.attempt("stamps of a long run"):
        n = EVENTS // 10 if stage.small else EVENTS
        found = in_child(stage, long_run, stage.device, n)
        stage.figures(long_run=found)
        holds = found["end_s"] < COLLECT_S and found["bytes_per_stamp"] < EVENT_BYTES
        holds = holds and found["steps"] == n
        stage.check(
            f"{n} stamps are kept and read",
            holds,
            f"{found['bytes_per_stamp']:.0f} bytes each, read in {found['end_s']:.2f} s",
        )


def judge(stage: Stage, ratios: list[float]) -> None:
    """The median ratio against the aim, where the blocks agree enough to tell.

    All blocks but the lowest and the highest count as the spread: of 8 blocks that is an interval of
    the median with 93 % (1 - 2 * 9 / 2^8).
    """
    what = "phase marks cost less than 1 % of a step"
    told = f"{median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
    stage.figures(marked_over_unmarked=told)
    if not stage.needs_gpu(what):
        return
    _, low, *_, high, _ = sorted(ratios)
    if high - low > COST and low < 1 + COST:
        stage.skip(what, f"the blocks spread by more than that: {told}")
    else:
        stage.check(what, median(ratios) < 1 + COST, told)


def ratios_of_blocks(device: str) -> list[float]:
    """Time of a block of steps with four marks each, in that of one without, taken in turns."""
    torch.set_num_threads(1)
    # On a GPU a step of a millisecond or more, like training's: an event takes about one of its microseconds.
    a = torch.eye(2048 if device == "cuda" else 192, device=device)
    clocks = [StepClock(device), StepClock(device)]
    for block in range(BLOCKS + 1):
        for clock in clocks if block % 2 else clocks[::-1]:
            marks = clock is clocks[1]
            clock.begin_epoch()
            for _ in range(STEPS):
                for phase in PHASES:
                    a = a @ a
                    if marks:
                        clock.mark_phase_end(phase)
                clock.mark_step_end()
            clock.end_epoch()
    plain, marked = (clock.epoch_times_s[1:] for clock in clocks)  # the first is a warm-up
    return [m / p for m, p in zip(marked, plain, strict=True)]


def long_run(device: str, n: int) -> dict[str, float]:
    """A clock with `n` ticks in one epoch, as a server's worker has: there is no end before the last."""
    clock = StepClock(device)
    process = psutil.Process()
    clock.begin_epoch()
    clock.mark_step_end()
    before_bytes = process.memory_info().rss
    for _ in range(n - 1):
        clock.mark_step_end()
    kept_bytes = process.memory_info().rss - before_bytes
    began = time.perf_counter()
    clock.end_epoch()
    return {
        "bytes_per_stamp": max(kept_bytes, 0) / n,
        "end_s": time.perf_counter() - began,
        "steps": len(clock.step_ms),
    }
