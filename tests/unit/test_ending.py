"""A command ends at once, but not before what it printed is written."""

from __future__ import annotations

import os
import subprocess
import sys

from launching import WORKFLOW


def test_what_was_printed_is_written_and_the_exit_code_is_told():
    code = (
        "import atexit; from stratbench.cell.ending import end_process;"
        "atexit.register(print, 'taken apart'); print('printed'); end_process(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW), "PYTHONUNBUFFERED": ""},
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\n", "")
