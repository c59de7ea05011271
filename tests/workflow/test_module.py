"""Another workflow uses this one as a module: by its path, under other names; not from a git host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from snakemake_forks import run_snakemake
from tiny_study import ROOT, TIMEOUT_S, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Has settings of its own, a rule on top of the study's table, and runs the module's handlers.
SNAKEFILE = """
configfile: "mine.yaml"
shell.prefix("MINE=kept; ")

module stratbench:
    snakefile: {source}
    config: config["stratbench"]
    {more}

use rule * from stratbench {names}

onstart:
    stratbench.onstart()

onsuccess:
    stratbench.onsuccess()

rule count:
    default_target: True
    input: "results/tiny/cells.csv"
    output: "counted.txt"
    shell: "echo $MINE $(grep -c ,ok, {{input}}) > {{output}}"
"""


class Project:
    """A folder with a workflow that uses stratbench."""

    def __init__(self, folder: Path, source: str, names: str = "", more: str = "") -> None:
        self.folder = folder
        config = tiny_config()
        experiments = config["studies"]["tiny"]["experiments"]
        del experiments["second"]
        experiments["first"]["gpus"] = [1]  # two cells: single and ddp
        del experiments["first"]["threads"]  # all of the machine's cores
        folder.mkdir()
        self.snakefile = folder / "Snakefile"
        self.snakefile.write_text(SNAKEFILE.format(source=source, names=names, more=more))
        (folder / "mine.yaml").write_text(yaml.safe_dump({"depth": 3, "stratbench": config}))

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end, started from another folder and without PYTHONPATH."""
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env = kept | {"XDG_CACHE_HOME": str(self.folder.parent / "cache")}
        command = ["-c2", "-s", str(self.snakefile), "-d", str(self.folder), *args]
        return subprocess.CompletedProcess(
            command, *run_snakemake(command, Path("/"), env, TIMEOUT_S)
        )


def test_another_workflow_trains_a_study_and_builds_on_its_table(tmp_path):
    source = repr(str(ROOT / "Snakefile"))
    project = Project(tmp_path / "project", source, names="as bench_*")
    done = project.run()
    assert done.returncode == 0, done.stdout
    assert (project.folder / "counted.txt").read_text() == "kept 2\n"
    # Its handlers ran: the cells shared the fork server that onstart makes ready.
    logs = list(project.folder.glob("results/tiny/logs/first/*/*/*/rep0.log"))
    assert len(logs) == 2
    assert all("share a fork server" in log.read_text() for log in logs)
    assert "Nothing to be done" in project.run("-n").stdout
    assert "bench_train_cell" in project.run("-n", "--forcerun", "bench_train_cell").stdout


def test_a_config_mistake_is_one_message_in_a_module_too(tmp_path):
    project = Project(tmp_path / "project", repr(str(ROOT / "Snakefile")))
    done = project.run("-n", "--config", "stratbench={study: none}")
    assert done.returncode != 0
    assert "config: study = 'none': is not a study" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_prefix_of_paths_is_refused(tmp_path):
    source = repr(str(ROOT / "Snakefile"))
    done = Project(tmp_path / "project", source, more='prefix: "bench"').run("-n")
    assert done.returncode != 0
    assert "set `results` in its config instead" in done.stdout


def test_a_module_from_a_git_host_is_refused(tmp_path):
    """The repository lies where Snakemake keeps what it has fetched."""
    shutil.copytree(ROOT / "workflow/rules", tmp_path / "repository/workflow/rules")
    shutil.copy(ROOT / "Snakefile", tmp_path / "repository")
    fetched = "cache/snakemake/snakemake/source-cache/snakemake-git-cache/github.com/an/owner"
    for command in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "all"),
        ("tag", "v1"),
        ("clone", "-q", "--bare", ".", tmp_path / fetched),
    ):
        subprocess.run(("git", *command), cwd=tmp_path / "repository", check=True, timeout=300)
    source = 'github("an/owner", path="Snakefile", tag="v1")'
    done = Project(tmp_path / "project", source).run("-n")
    assert done.returncode != 0
    assert "clone its repository, and give the path of the clone's Snakefile" in done.stdout
    assert "Traceback" not in done.stdout
