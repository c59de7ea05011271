"""Follows a tutorial's page: writes its files, runs its commands, and compares what they print.

A fence ``console`` holds commands (`$ ...`), each above what it prints. There `…` stands for text that
varies, and as a line of its own for any number of lines. A fence below a line that ends with "`NAME`:" is
the content of that file. Below the last command stands what is not followed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+)`:\s*$")
ANY = "…"
#: Seconds that a command may take: minutes, but on a very busy machine.
MAX_COMMAND_S = 1800


@dataclass(frozen=True)
class Step:
    """A file to write, or a command and the lines that it prints."""

    command: str = ""
    printed: list[str] = field(default_factory=list)
    file: str = ""
    content: str = ""


def read_steps(page: str) -> list[Step]:
    """Return what a page asks for, in order; AssertionError if it names no file for a fence's content."""
    steps: list[Step] = []
    nameless = ""
    for fence in FENCE.finditer(page):
        kind, body = fence.groups()
        named = FILE.search(page[: fence.start()])
        if kind == "console":
            assert not nameless, f"no line that ends with `NAME`: is above\n{nameless}"
            for line in body.splitlines():
                if line.startswith("$ "):
                    steps.append(Step(command=line[2:]))
                else:
                    steps[-1].printed.append(line)
        elif named:
            steps.append(Step(file=named.group(1), content=body))
        else:
            nameless = body
    return steps


def expected_output(printed: list[str]) -> re.Pattern[str]:
    """Return what an output must hold, from a page's lines, wherever it breaks them."""
    parts = []
    for line in printed:
        if line.strip() == ANY:
            parts.append(r"(?:.*\n)*?")
        else:
            texts = (re.sub(r"(?:\\ )+", r"\\s+", re.escape(t)) for t in line.rstrip().split(ANY))
            parts.append(r".*?".join(texts) + r"[ ]*\n")
    return re.compile(r"^" + "".join(parts), re.MULTILINE)


class Follower:
    """Follows steps in a folder, with `stratbench` as a command and no network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir()
        program = programs / "stratbench"
        program.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m stratbench.command "$@"\n'
        )
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if name != "STRATBENCH_DATA"}
        self.environment = kept | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "workflow"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def follow(self, step: Step) -> None:
        """Write the step's file, or run its command; AssertionError if it prints something else."""
        if step.file:
            (self.folder / step.file).write_text(step.content, encoding="utf-8")
            return
        if step.command.startswith("cd "):
            self.folder /= step.command.removeprefix("cd ")
            return
        done = subprocess.run(
            ["bash", "-c", step.command],
            cwd=self.folder, env=self.environment, text=True, timeout=MAX_COMMAND_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {step.command}\n{done.stdout}"
        assert expected_output(step.printed).search(done.stdout), f"$ {step.command}\n{done.stdout}"
