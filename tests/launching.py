"""What tests that train cells by the real launcher share: its path, a tiny data set, settings."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stratbench.cells import Cell
from stratbench.config import Settings, option_defaults

WORKFLOW = Path(__file__).parents[1] / "workflow"
TINY = {
    "source": "synthetic", "train_samples": 64, "test_samples": 40, "classes": 3, "channels": 1,
    "size": 16,
}  # fmt: skip


@dataclass
class LaunchedCell:
    """A launcher at work, and where it leaves what."""

    cell: Cell
    process: subprocess.Popen[str]
    record: Path
    timeline: Path
    logs: Path

    @property
    def run_dir(self) -> Path:
        return self.logs / "run"

    def finish(self, timeout_s: float = 120) -> tuple[int, str]:
        """Exit code, and what was printed (stdout and stderr)."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def read_record(self) -> dict[str, Any]:
        return json.loads(self.record.read_text())


def settings(strategy: str = "ddp", **changes: Any) -> Settings:
    """Settings of a short cell on 2 CPU workers; `options` are the strategy's defaults."""
    base = Settings(
        strategy=strategy, options={}, model="vgg-compact", dataset="tiny", gpus=2, seed=7,
        epochs=1, global_batch=16, per_worker_batch=8, lr=0.05, momentum=0.9, weight_decay=0.0,
        nesterov=False, precision="fp32", augment=False, warmup_steps=2, device="cpu", threads=1,
        slowdown=None,
    )  # fmt: skip
    if "options" not in changes:
        changes["options"] = option_defaults(strategy)
    return replace(base, **changes)
