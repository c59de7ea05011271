"""The test cluster itself: it runs jobs as a real one does, leaves nothing, harms nobody's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cluster_host
import pytest
from cluster import SlurmCluster
from cluster_conf import MEMORY_EACH_SECOND
from cluster_host import Unavailable, cluster_processes, install, listening, refusal

from launching import LIMIT_S, until

CLUSTER = Path(__file__).with_name("cluster.py")
pytest_plugins = ["cluster_fixtures"]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(400),  # packages may have to be installed
]


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty directory with a path short enough for a unix socket."""
    path = tmp_path_factory.mktemp("c", numbered=True)
    yield path
    shutil.rmtree(path)


def finished(cluster: SlurmCluster, job: str) -> str:
    """The state in which a job ended, once it has."""
    over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"}

    def state() -> str | None:
        told = cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
        return told if told in over else None

    return until(state)


def test_two_nodes_are_idle(slurm: SlurmCluster) -> None:
    assert slurm.node_states() == {"node1": "idle", "node2": "idle"}


def test_a_batch_job_runs_a_step_on_each_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    step = "srun --ntasks-per-node=1 sh -c 'echo $SLURM_NODEID $SLURMD_NODENAME'"
    job = slurm.submit(out, step, "--nodes=2", "--ntasks=2")
    assert finished(slurm, job) == "COMPLETED", out.read_text()
    assert sorted(out.read_text().splitlines()) == ["0 node1", "1 node2"]


def test_jobs_see_the_gpus_they_were_given(slurm: SlurmCluster, tmp_path: Path) -> None:
    if not (slurm.directory / "dev" / "nvidia0").is_char_device():
        pytest.skip("no device files can be made here, and SLURM names only those to a job")
    show = "echo batch $CUDA_VISIBLE_DEVICES; srun sh -c 'echo step $CUDA_VISIBLE_DEVICES; sleep 2'"
    jobs = [
        slurm.submit(tmp_path / f"{n}", show, "--gres=gpu:2", "--nodelist=node1", "--ntasks=1")
        for n in range(2)
    ]
    assert [finished(slurm, job) for job in jobs] == ["COMPLETED"] * 2
    seen = [sorted((tmp_path / f"{n}").read_text().splitlines()) for n in range(2)]
    assert seen == [["batch 0,1", "step 0,1"], ["batch 2,3", "step 2,3"]]


def test_a_job_over_its_memory_is_killed_and_fails(slurm: SlurmCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    eat = "import time; kept = bytearray(600_000_000); time.sleep(600)"
    options = ("--mem=300", "--ntasks=1", MEMORY_EACH_SECOND)
    job = slurm.submit(out, f'srun -n1 {sys.executable} -c "{eat}"', *options)
    # A production cluster's cgroups say OUT_OF_MEMORY; sampling, as here, says FAILED.
    assert finished(slurm, job) == "FAILED"
    assert "exceeded memory limit" in out.read_text()


def test_a_lost_node_fails_its_jobs_and_comes_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = ("--nodelist=node2", "--no-requeue", "--ntasks=1")
    running = tmp_path / "running"
    job = slurm.submit(tmp_path / "out", f"srun sh -c 'touch {running}; sleep 1000'", *options)
    until(running.exists)
    slurm.lose_node("node2")
    assert finished(slurm, job) == "NODE_FAIL"
    slurm.restore_node("node2")
    assert slurm.node_states()["node2"] == "idle"


def test_an_exception_takes_the_cluster_down_and_leaves_no_process_and_no_port(
    directory: Path,
) -> None:
    ports: list[int] = []

    def fail() -> None:
        with SlurmCluster(directory) as cluster:
            cluster.submit(directory / "out", "trap '' TERM; while :; do sleep 1; done")
            ports.extend(cluster.ports.values())
            assert sorted(listening(ports)) == sorted(ports)
            until(lambda: len(cluster.processes()) > 6)  # the daemons and the job
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    cluster = SlurmCluster.existing(directory)
    assert cluster_processes(cluster.directory, cluster.name) == set()
    assert listening(ports) == []


def test_a_killed_owner_leaves_nothing(directory: Path) -> None:
    own = (
        f"import sys, time; sys.path.insert(0, {str(CLUSTER.parent)!r})\n"
        "from cluster import SlurmCluster\n"
        f"SlurmCluster({str(directory)!r}).start()\n"
        "print('up', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", own], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"up\n"
        cluster = SlurmCluster.existing(directory)
        assert cluster.processes()
    finally:
        owner.kill()
        owner.wait(timeout=LIMIT_S)
    until(lambda: not cluster.processes())
    # A process that ends has no environment any more, by which it is known, before its ports are closed.
    until(lambda: not listening(list(cluster.ports.values())))


def test_the_command_line_brings_a_cluster_up_and_down(directory: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, CLUSTER, *arguments], capture_output=True, text=True, timeout=LIMIT_S
        )

    up = command("up", str(directory), "--cpus", "4", "--gpus", "2")
    try:
        assert up.returncode == 0, up.stderr
        script = command("env", str(directory)).stdout + "sinfo -h -N -o '%N %c %G'"
        shown = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert shown.stdout.splitlines() == ["node1 4 gpu:2", "node2 4 gpu:2"], shown.stderr
        again = command("up", str(directory))
        assert again.returncode == 1
        assert "already runs" in again.stderr
    finally:
        down = command("down", str(directory))
    assert down.returncode == 0, down.stderr
    assert not SlurmCluster.existing(directory).processes()


def test_a_directory_of_something_else_is_left_alone(directory: Path) -> None:
    (directory / "thesis.tex").write_text("years of work")
    with pytest.raises(Unavailable, match="neither empty nor"):
        SlurmCluster(directory).start()
    assert (directory / "thesis.tex").read_text() == "years of work"


def test_a_host_with_a_configuration_is_refused(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    assert refusal(tmp_path / "own", environ={}, host_configuration=[conf]) is None
    conf.write_text("ClusterName=theirs\n")
    assert str(conf) in refusal(tmp_path / "own", environ={}, host_configuration=[conf])


def test_a_foreign_slurm_conf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert refusal(tmp_path, environ=own, host_configuration=[]) is None
    monkeypatch.setenv("SLURM_CONF", "/somewhere/slurm.conf")
    with pytest.raises(cluster_host.Refused, match="SLURM_CONF is set to /somewhere/slurm"):
        SlurmCluster(tmp_path).start()
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_when_they_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_host, "which", lambda program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match=r"slurmctld, slurmd.* not found; install the packages"):
        install()
