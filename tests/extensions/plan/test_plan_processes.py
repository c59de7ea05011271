"""Processes of the plan: they have PyTorch from the start, share one import of it, and may be killed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from launching import LIMIT_S, WORKFLOW
from process_server import IMPORTED
from stratbench.cell.files import format_os_error
from stratbench.extensions.plan.check import CheckResult, DryRun
from stratbench.extensions.plan.footprint import cache, processes

#: Two pools; of a process of each: its parent, whether a fresh one has what takes long to import, its GPUs.
PROGRAM = """
import json, os, sys
from stratbench.extensions.plan.footprint.processes import make_process_pool

def found():
    imported = [m in sys.modules for m in ("torch._dynamo", "stratbench.extensions.plan.footprint.fake")]
    seen = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("TORCH_DISTRIBUTED_DEBUG")
    return os.getppid(), imported, seen

if __name__ == "__main__":
    import program
    both = []
    for _ in range(2):
        with make_process_pool(1) as pool:
            both.append(pool.submit(program.found).result())
    print(json.dumps(both))
"""


@pytest.mark.slow
def test_two_pools_share_one_import_and_see_no_gpu(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join((str(WORKFLOW), str(tmp_path)))
    printed = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ
        | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0,1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert printed.returncode == 0, printed.stderr
    (parent, imported, seen), (other_parent, other_imported, _) = json.loads(printed.stdout)
    assert parent == other_parent
    assert imported == other_imported == [True, True]
    # On fake tensors, PyTorch would wait for a real GPU here and there, and wrap a fake group as a real one.
    assert seen == ["", None]


@pytest.mark.slow
def test_a_pool_of_a_test_has_what_processes_of_all_tests_import():
    with processes.make_process_pool(1) as pool:
        imported = pool.submit(eval, "set(__import__('sys').modules)").result()
    assert imported >= set(IMPORTED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CheckResult, DryRun])
def test_of_a_process_that_is_killed_the_fault_is_told_and_nothing_is_kept(kind, tmp_path, capsys):
    jobs = {"mine": cache.CachedJob("resnet", (9,), {"some": "request"})}
    made = cache.compute_cached_results("networks to check: {}", kind, os._exit, jobs, tmp_path)
    assert made["mine"].fault == "its process was killed (out of memory?)"
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == "networks to check: 1\n  resnet: 1 of 1\n"


def test_results_have_the_order_of_the_jobs_though_the_longest_ends_first(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "list_usable_cores", lambda: [0])
    monkeypatch.setattr(cache, "make_process_pool", lambda n, *_: ThreadPoolExecutor(n))
    jobs = {
        name: cache.CachedJob(name, (name,), {"name": name}, 1 + i) for i, name in enumerate("abc")
    }
    ended = []

    def work(name: str) -> CheckResult:
        ended.append(name)
        return CheckResult()

    made = cache.compute_cached_results("networks to check: {}", CheckResult, work, jobs, tmp_path)
    assert ended == ["c", "b", "a"]
    assert list(made) == ["a", "b", "c"]


def test_a_folder_in_which_no_semaphore_can_be_made_is_named(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(processes, "ProcessPoolExecutor", refuse)
    with pytest.raises(OSError, match="/dev/shm") as told:
        processes.make_process_pool(1)
    assert format_os_error(told.value) == "Read-only file system: /dev/shm"
