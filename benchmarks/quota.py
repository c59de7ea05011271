"""Cores of a fixed speed for the workers of `projection_own.py`: each process in a control group of its own.

A group may use a share of a core's time, whatever else runs: many workers then fit on few cores, and one more
takes nothing from the others. Needs the cpu controller of control groups v1 and the right to make groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

CONTROLLER = Path("/sys/fs/cgroup/cpu")
#: Names the folder of the groups; without it processes stay where they are.
VARIABLE = "PROJECTION_OWN_GROUPS"
#: As short as can be at a fifth of a core, since the kernel gives no quota below 1 ms.
PERIOD_US = 5_000
#: Samples that the network computes at a time.
TOGETHER = 4
#: So much more than others' that a process gets its quota on a busy machine, too.
WEIGHT = 262_144


@contextmanager
def groups(share: float) -> Iterator[None]:
    """While it is open processes may `enter` groups of `share` of a core each."""
    folder = CONTROLLER / f"projection-own-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.shares").write_text(str(WEIGHT), encoding="utf-8")
    except OSError as error:
        raise SystemExit(
            f"error: {CONTROLLER}: no control group can be made ({error.strerror}); the benchmark needs "
            "root and the cpu controller of control groups v1"
        ) from error
    os.environ[VARIABLE] = f"{folder}:{share}"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        _remove(folder)


def enter() -> None:
    """Put this process with all its threads into a group of its own, if groups are open."""
    if VARIABLE not in os.environ:
        return
    folder, _, share = os.environ[VARIABLE].rpartition(":")
    own = Path(folder) / str(os.getpid())
    own.mkdir(exist_ok=True)
    (own / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="utf-8")
    (own / "cpu.cfs_quota_us").write_text(str(round(float(share) * PERIOD_US)), encoding="utf-8")
    (own / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")


def leave() -> None:
    """Put this process back among all others."""
    (CONTROLLER / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")


def _remove(folder: Path) -> None:
    """Remove the groups; one whose process is still ending is waited for."""
    for group in [*(p for p in folder.iterdir() if p.is_dir()), folder]:
        deadline = time.monotonic() + 30
        while group.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


class QuotaNet(nn.Module):
    """Convolutions that take most of a step, and a dense layer with most of a million parameters.

    It computes a few samples at a time, so that one takes as long in any batch: caches do not decide. It
    enters its process into a group when it is built, which every worker does before it trains.
    """

    def __init__(self, classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        enter()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            *(m for _ in range(8) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())),
            nn.AdaptiveAvgPool2d(8),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 64, 400), nn.ReLU(), nn.Linear(400, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.features(part) for part in x.split(TOGETHER)]))
