"""A copy of the workflow with a tiny study of its own, run by the real Snakemake."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import yaml
from snakemake_forks import StartedSnakemake, run_snakemake

import invariants
from stratbench.train.forkserver import FOLDER_VARIABLE

ROOT = Path(__file__).parents[2]
#: The longest that a run of Snakemake may take: minutes, but many on a very busy machine.
TIMEOUT_S = 1800
#: A line of the rules that starts a fork server, and one in its place.
STARTS_SERVER = "        forkserver.share_fork_server_until_exit()\n"
STARTS_NONE = "        pass  # the tests have started a fork server\n"
#: Appended to the copy's log of phases: a held worker waits at the start of an epoch.
WAIT_WHILE_HELD = """
_write = PhaseLog.write_phase_event


def _write_and_wait(self, phase, event, at_s=None):
    _write(self, phase, event, at_s)
    held = Path("held")
    while phase == "train" and any((held / part).exists() for part in Path(self._file.name).parts[1:]):
        self._alive()  # as one that is slow: it does not hang
        time.sleep(0.05)


PhaseLog.write_phase_event = _write_and_wait
"""


def tiny_config() -> dict:
    """Two experiments on a small synthetic set, whose cells each take seconds."""
    common = {
        "dataset": "tiny-images",
        "models": ["vgg-compact"],
        "epochs": 1,
        "global_batch": 32,
        "lr": 0.05,
        "device": "cpu",
        "threads": 1,
        "time_limit_s": 1200,  # whatever else the machine does
    }
    config = {
        "study": "tiny",
        "datasets": {
            "tiny-images": {
                "source": "synthetic",
                "train_samples": 128,
                "test_samples": 64,
                "channels": 1,
                "size": 16,
            }
        },
        "studies": {
            "tiny": {
                "experiments": {
                    "first": {**common, "strategies": ["single", "ddp"], "gpus": [1, 2]},
                    "second": {**common, "strategies": ["single"], "gpus": [1]},
                }
            }
        },
    }
    return json.loads(json.dumps(config))  # no list is shared between experiments


def skipping_config() -> dict:
    """The same with a network of 134 million parameters, for workers that may use 276 MiB."""
    config = tiny_config()
    config["studies"]["tiny"]["experiments"]["second"]["models"].append("vgg16")
    config["cluster"] = {"gpu": "A10G 24GB", "mem_mib_per_gpu": 1300, "skip_infeasible": True}
    return config


def end(process: StartedSnakemake) -> None:
    """Kill a Snakemake that still runs, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def make_holdable(package: Path) -> None:
    """Have workers of the package in the folder `package` wait while their cells are held."""
    with (package / "stratbench/telemetry/timeline.py").open("a") as file:
        file.write(WAIT_WHILE_HELD)


class Workflow:
    """The workflow in a folder of its own."""

    def __init__(self, folder: Path, config: dict) -> None:
        self.folder = folder
        self.variables: dict[str, str] = {}  # of the environment, changed for this copy
        for name in ("workflow", "profiles", "envs"):
            # With what is compiled, but for files that another process is just writing.
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        shutil.copy(ROOT / "Snakefile", folder)
        self.write_config(config)

    def write_config(self, config: dict) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--profile", "profiles/local", *args]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "STRATBENCH_DATA")}
        return kept | {"XDG_CACHE_HOME": str(self.folder / "cache")} | self.variables

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run Snakemake to its end; output and errors together in `stdout`.

        The records that there are then keep all invariants.
        """
        _, _, _, *given = command = self.command(*args)
        done = run_snakemake(given, self.folder, self.environment(), TIMEOUT_S)
        assert invariants.broken_below(self.folder / "results") == []
        return subprocess.CompletedProcess(command, *done)

    def start(self, *args: str, stdout: IO[str] | None = None) -> StartedSnakemake:
        """Start Snakemake in a session of its own. What a failed test leaves running ends with the tests."""
        _, _, _, *given = self.command(*args)
        process = StartedSnakemake(given, self.folder, self.environment(), stdout)
        atexit.register(end, process)
        return process

    def jobs(self, *args: str) -> dict[str, int]:
        """The jobs of a dry run, by rule."""
        done = self.run("-n", *args)
        assert done.returncode == 0, done.stdout
        if "Nothing to be done" in done.stdout:
            return {}
        lines = done.stdout.split("Job stats:")[1].split("total")[0].splitlines()[3:]
        return {rule: int(count) for rule, count in (x.split() for x in lines if x.strip())}

    def hold(self, *experiments: str) -> None:
        """Have the cells of `experiments`, of a collective strategy, train no step until `release`.

        So they train when a test wants them to, on a slow machine, too.
        """
        held = self.folder / "held"
        if not held.exists():
            held.mkdir()
            make_holdable(self.folder / "workflow")
        for experiment in experiments:
            (held / experiment).touch()

    def release(self, *experiments: str) -> None:
        for experiment in experiments:
            (self.folder / "held" / experiment).unlink()

    def change_code(self, path: str, line: str, replacement: str) -> None:
        """Put `replacement` in place of a line of a file of the copy."""
        file = self.folder / path
        text = file.read_text()
        assert text.count(line) == 1, f"{line!r} is not once in {path}"
        file.write_text(text.replace(line, replacement))

    def share_import(self, warm: Mapping[str, str]) -> None:
        """Let cells share the fork server of `warm`, which has the code from here, and not from the copy.

        For where the server that a run starts is not what is tested.
        """
        self.change_code("workflow/rules/train.smk", STARTS_SERVER, STARTS_NONE)
        self.variables[FOLDER_VARIABLE] = warm[FOLDER_VARIABLE]

    def import_again(self) -> None:
        """Undo `share_import`: each run starts a server, with the code of the copy."""
        self.change_code("workflow/rules/train.smk", STARTS_NONE, STARTS_SERVER)
        del self.variables[FOLDER_VARIABLE]

    def record(self, *parts: str, study: str = "tiny") -> Path:
        return self.folder.joinpath("results", study, "cells", *parts, "rep0", "record.json")
