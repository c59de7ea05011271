"""A command ends at once, but not before it has cleared away and what it printed is written."""

from __future__ import annotations

import os
import subprocess
import sys

from launching import WORKFLOW

CODE = """
import atexit
from stratbench.cell.ending import end_process

class Imported:
    def __del__(self):
        print("taken apart")

imported = Imported()
atexit.register(print, "cleared away")
print("printed")
end_process(3)
"""


def test_what_was_printed_is_written_and_the_exit_code_is_told():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW), "PYTHONUNBUFFERED": ""},
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\ncleared away\n", "")
