"""Checks that torch.compile can work on this machine, and counts its compilations.

This module does not import torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any


def missing_compiler_reason(cuda: bool) -> str | None:
    """Return why torch.compile cannot work on this machine, with the remedy. None if it can.

    torch.compile needs a C++ compiler for a CPU, and Triton and a C compiler for a GPU.
    """
    wanted = ("CC", "gcc") if cuda else ("CXX", "g++")
    command = os.environ.get(wanted[0]) or wanted[1]
    remedy = "install it, or set compile: false"
    if cuda and importlib.util.find_spec("triton") is None:
        return f"compile = true: the package triton is not installed; {remedy}"
    if shutil.which(command) is None:
        return f"compile = true: torch.compile needs the compiler {command!r}, which is missing; {remedy}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"compile = true: torch.compile needs Python's headers (Python.h); {remedy}"
    return None


class CompileWatch:
    """Counter of torch.compile's compilations in this process, and of their seconds.

    The compilations of forward and of backward count separately.
    """

    def __init__(self) -> None:
        from stratbench.workload.torch_internals import register_compilation_callbacks

        self.compilations, self.seconds = 0, 0.0
        self._begun, self._warm = 0.0, 0
        register_compilation_callbacks(self._note_compile_start, self._note_compile_end)

    def _note_compile_start(self, _: Any) -> None:
        self._begun = time.perf_counter()

    def _note_compile_end(self, _: Any) -> None:
        self.compilations += 1
        self.seconds += time.perf_counter() - self._begun

    def mark_warm_up_end(self) -> None:
        """Mark the end of the warm-up. Each later compilation counts as a recompilation."""
        self._warm = self.compilations

    def summarize_compilations(self) -> dict[str, float]:
        """Return the number of compilations, their total seconds, and the number of recompilations."""
        return {
            "compilations": self.compilations,
            "compile_s": self.seconds,
            "recompilations": self.compilations - self._warm,
        }
