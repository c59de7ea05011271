"""What checkpoints cost a synchronous training, and what a restart from one does (`checkpoint_every`).

    PYTHONPATH=workflow python benchmarks/checkpoint_cost.py

Writes results/elastic/checkpoints.md; some minutes. A cell of `ddp` on two CPU processes of this host, for
states of several sizes, is killed by SIGKILL after its second checkpoint, launcher and all, and started
again. Its own record says what it cost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.train.restarts import attempts
from stratbench.workload.data.prepare import prepare

OUT = Path(__file__).parent / "results" / "elastic"
MODELS = ("vgg-compact", "resnet50")
DATA = {
    "source": "synthetic", "train_samples": 64, "test_samples": 8, "classes": 3, "channels": 3, "size": 32,
    "seed": 0,
}  # fmt: skip
#: Steps between two checkpoints, and of the whole training.
EVERY, STEPS = 2, 8


def cell_of(model: str, folder: Path) -> tuple[list[str], Path, RunFolder]:
    """The launcher's command for a cell of `model`, its record, and its run folder."""
    from launching import settings

    s = settings(
        "ddp", model=model, dataset="made", data_spec=DATA, global_batch=4, per_worker_batch=2
    )
    s = replace(s, epochs=None, steps=STEPS, checkpoint_every=EVERY, warmup_steps=1)
    cell = Cell("checkpoints", "cost", "ddp", model, "made", 2, 0)
    record, logs = cell.record_path(folder), cell.log_dir(folder)
    command = [sys.executable, "-m", "stratbench.train.launch", "--cell", json.dumps(asdict(cell))]
    command += ["--settings", s.as_json(), "--data", str(folder / "data"), "--logs", str(logs)]
    command += ["--record", str(record), "--timeline", str(folder / f"{model}.csv")]
    return command, record, RunFolder.of_logs(logs)


def restarted(model: str, folder: Path) -> dict[str, Any]:
    """The record's `restarts` of a cell that was killed once."""
    from launching import kill_all

    command, record, run = cell_of(model, folder)
    with open(folder / "launcher.log", "ab") as said:
        launcher = subprocess.Popen(command, stdout=said, stderr=said)
        while (attempts.common_step(run, 2) or 0) < 2 * EVERY:
            if launcher.poll() is not None:
                raise RuntimeError((folder / "launcher.log").read_text(encoding="utf-8")[-2000:])
            time.sleep(0.01)
        kill_all(launcher)
        subprocess.run(command, stdout=said, stderr=said, check=True)
    return json.loads(record.read_text(encoding="utf-8"))["restarts"]


def row_of(model: str, told: dict[str, Any]) -> str:
    """A line of the table."""
    kept = told["checkpoints"]
    held_s, written_s = (kept[key] / kept["count"] for key in ("held_up_s", "written_s"))
    mb = kept["bytes"] / 2e6
    return (
        f"| {model} | {mb:,.3g} | {kept['count']} | {held_s:.2g} | {written_s:.2g} | "
        f"{told['repeated_s']:.2g} | {told['until_step_s']:.2g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    import torch

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare("made", folder / "data", spec=DATA)
        rows = [row_of(model, restarted(model, folder)) for model in MODELS]
    text = f"""# What checkpoints cost, and a restart from one

Made by `benchmarks/checkpoint_cost.py`: PyTorch {torch.__version__}, `ddp` on 2 processes,
{os.cpu_count()} CPU cores ({platform.machine()}), no GPU, local disk, load average {load:.1f} at the start.
One checkpoint holds a worker's weights, momentum and buffers. All workers stop for it while the state is
copied; then it is written beside the training. Seconds are means of the checkpoints; the restart is one
SIGKILL of everything after the second one.

| network | MB a worker | checkpoints | stop, s | written in, s | done again, s | start to first step, s |
|---|--:|--:|--:|--:|--:|--:|
{chr(10).join(rows)}
"""
    (given.out / "checkpoints.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
