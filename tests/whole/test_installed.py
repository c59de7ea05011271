"""A wheel, built and installed in an environment of its own: what a clone has is found there, too."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from launching import LIMIT_S
from stratbench.command.__main__ import main

ROOT = Path(__file__).parents[2]
#: The folders of which a wheel has all files.
PARTS = ("workflow", "envs", "profiles")
#: Others of a clone, which an sdist has as well: with them a packager can test.
OTHERS = (".ci", "benchmarks", "docs", "tests")
FILES = (
    *("Snakefile", "config.yaml", "pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"),
    *("CITATION.cff", "Makefile", "README.md", "CHANGELOG.md", "ARCHITECTURE.md"),
)

pytestmark = pytest.mark.timeout(300)


class Installed:
    """An environment with the wheel of an sdist of a checkout, and no clone on its path."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        for name in (*PARTS, *OTHERS):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", "_build")
            shutil.copytree(ROOT / name, self.source / name, ignore=ignored)
        for name in FILES:
            shutil.copy(ROOT / name, self.source)
        self.files = {p.relative_to(self.source) for p in self.source.rglob("*") if p.is_file()}
        git = ("git", "-C", self.source, "-c", "user.name=a", "-c", "user.email=a@b")
        for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
            subprocess.run((*git, *command), check=True, timeout=LIMIT_S)
        asked = subprocess.run((*git, "rev-parse", "HEAD"), check=True, capture_output=True)
        self.revision = asked.stdout.decode().strip()
        make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
        self.printed = self._printed_by([sys.executable, "-c", make])
        [self.sdist] = folder.glob("*.tar.gz")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        build = (*pip, "-v", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
        self.printed += self._printed_by([*build, "-w", folder, self.sdist])
        [self.wheel] = folder.glob("*.whl")
        pip = (*pip, "-q")
        self.python = folder / "venv/bin/python"
        venv = (sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        subprocess.run(venv, check=True, timeout=LIMIT_S)
        [self.packages] = (folder / "venv/lib").glob("python*/site-packages")
        (self.packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
        subprocess.run(
            (
                *pip,
                "--python",
                self.python,
                "install",
                "--no-compile",
                "--no-deps",
                "--no-index",
                self.wheel,
            ),
            check=True,
            timeout=LIMIT_S,
        )

    def _printed_by(self, command: list[str | Path]) -> str:
        return subprocess.run(
            command,
            cwd=self.source,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=LIMIT_S,
        ).stdout

    def run(self, *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """The command `stratbench`, from another folder."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "STRATBENCH"))
        }
        return subprocess.run(
            [self.python.with_name("stratbench"), *args],
            cwd=cwd,
            env=kept | {"XDG_CACHE_HOME": str(self.packages.parents[3])},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )


def pins(name: str) -> dict[str, str]:
    """The versions by package in a file of requirements."""
    lines = (ROOT / "envs" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_workflow(installed):
    def ours(path: Path) -> bool:
        return path.is_file() and "egg-info" not in str(path) and path.suffix != ".pyc"

    wanted = set()
    for path in filter(ours, (p for part in PARTS for p in (ROOT / part).rglob("*"))):
        name = path.relative_to(ROOT).as_posix()
        inner = name.removeprefix("workflow/") if name.startswith("workflow/stratbench/") else None
        wanted.add(inner or f"stratbench/_repository/{name}")
    with zipfile.ZipFile(installed.wheel) as wheel:
        assert wanted - set(wheel.namelist()) == set()


@pytest.mark.slow
def test_an_sdist_has_every_file_of_a_clone_and_builds_without_a_warning(installed):
    with tarfile.open(installed.sdist) as sdist:
        names = {Path(*Path(m.name).parts[1:]) for m in sdist.getmembers() if m.isfile()}
    assert installed.files - names == set()
    # No wheel has compiled modules, which setuptools warns of.
    warnings = [line for line in installed.printed.splitlines() if re.search("(?i)warning", line)]
    assert [line for line in warnings if "byte-compiling is disabled" not in line] == []


@pytest.mark.slow
def test_an_extra_has_the_packages_of_its_requirements(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        [name] = [n for n in wheel.namelist() if n.endswith("/METADATA")]
        lines = wheel.read(name).decode().splitlines()
    asked = [Requirement(x.removeprefix("Requires-Dist: ")) for x in lines if "; extra ==" in x]
    for extra in ("deepspeed", "export", "transformers"):
        wanted = {r.name: r for r in asked if r.marker.evaluate({"extra": extra})}
        tested = pins(f"requirements-{extra}.txt")
        assert wanted.keys() == tested.keys()
        for package, pin in tested.items():
            assert pin in wanted[package].specifier
        # Its settings have other names in other versions; other packages stay as they are if newer.
        assert (extra == "deepspeed") == ("9999" not in next(iter(wanted.values())).specifier)


@pytest.mark.slow
def test_an_installed_package_knows_its_files_and_no_foreign_checkout(installed, tmp_path):
    code = (
        "from stratbench.cell import installation as places; from stratbench.cell import record;"
        "from stratbench.study.config.schema import build_config_schema as schema;"
        "from stratbench.extensions.paper import published;"
        "assert record.load_schema() and schema() and len(published.read_published_tables());"
        "print(places.INSTALLED, places.read_build_revision())"
    )
    done = subprocess.run(
        [installed.python, "-c", code],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    # The revision that the sdist was made from: what the wheel was built from is no checkout.
    assert done.stdout.split(maxsplit=1) == [
        "True",
        f"{{'revision': '{installed.revision}', 'dirty': False}}\n",
    ]


@pytest.mark.slow
def test_a_study_that_init_lays_down_runs(installed, tmp_path):
    study = tmp_path / "study"
    assert "config.yaml" in installed.run("init", study, cwd=tmp_path).stdout
    again = installed.run("init", study, cwd=tmp_path)
    assert (again.returncode, "is not an empty folder" in again.stdout) == (2, True)
    config = yaml.safe_load((study / "config.yaml").read_text())
    experiment = config["studies"]["mine"]["experiments"]["first"]
    planned = installed.run("run", "-n", cwd=study)
    cells = 2 * (1 + 2 * 2)  # single is on one worker alone
    assert re.search(rf"train_cell +{cells}\n", planned.stdout), planned.stdout
    experiment |= {"strategies": ["single"], "epochs": 1}
    (study / "config.yaml").write_text(yaml.safe_dump(config | {"results": "out"}))
    once = ("--config", "studies={mine: {repeats: 1}}")
    done = installed.run("run", "out/mine/cells.csv", *once, cwd=study)
    assert done.returncode == 0, done.stdout
    record = json.loads(next(study.glob("out/mine/cells/*/*/*/*/*/record.json")).read_text())
    # Not that of the study's own checkout.
    assert record["provenance"]["git"] == {"revision": installed.revision, "dirty": False}
    bundled = installed.run("bundle", "--replace-hosts", *once, cwd=study)
    assert "1 record" in bundled.stdout
    # From here on nothing of the study is at hand but this file.
    bundle = shutil.move(study / "out/mine/mine.stratbench.zip", tmp_path)
    shutil.rmtree(study)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    decided = installed.run("decide", bundle, cwd=elsewhere)
    assert "vgg-compact (first): single × 1, " in decided.stdout
    planned = installed.run("plan", bundle, "--config", "cluster={gpu: A100 40GB}", cwd=elsewhere)
    assert planned.returncode == 0, planned.stdout
    [row] = csv.DictReader((elsewhere / "mine.plan/plan.csv").open())
    assert (row["strategy"], row["state"]) == ("single", "done")  # it was trained, says the bundle
    assert {p.name for p in elsewhere.iterdir()} == {"mine.plan", "mine.decision"}


@pytest.mark.slow
def test_conda_environments_are_refused_since_they_do_not_find_the_package(installed, tmp_path):
    study = tmp_path / "study"
    installed.run("init", study, cwd=tmp_path)
    refused = installed.run("run", "-n", "--sdm", "conda", cwd=study)
    assert refused.returncode == 1
    assert "--sdm conda: a conda environment does not find the stratbench" in refused.stdout
    assert "Traceback" not in refused.stdout


def test_metadata_asks_for_the_packages_of_the_requirements_and_allows_their_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {r.name: r for r in map(Requirement, project["dependencies"])}
    assert wanted.keys() == pins("requirements.txt").keys()
    for name, pin in pins("requirements.txt").items():
        assert pin in wanted[name].specifier, f"{name}: {pin}"


@pytest.mark.slow
def test_sets_are_judged_with_the_packages_of_the_analysis_alone(tmp_path):
    """Those that requirements-analysis.txt leaves out are not there, as on a laptop without PyTorch."""
    left_out = pins("requirements.txt").keys() - pins("requirements-analysis.txt").keys()
    modules = {"scikit-learn": "sklearn", "nvidia-ml-py": "pynvml"}
    blocked = [
        modules.get(name, name) for name in left_out if name != "snakemake-executor-plugin-slurm"
    ]
    assert {"torch", "snakemake", "psutil"} < set(blocked)
    code = f"""
import sys

class Away:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Away())
from stratbench.command.__main__ import main
for command in (
    "decide paper:v2", "check paper:v1", "compare a=paper:v1 b=paper:v2 --fail-above 0.00001", "plan paper:v2"
):
    print("exit code", main(command.split()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "workflow")},
        text=True,
        capture_output=True,
        check=True,
    )
    assert "vgg16 (ddp-fsdp): ddp × 4, " in done.stdout
    assert re.findall(r"exit code (\d)", done.stdout) == ["0", "1", "0", "2"]
    assert done.stderr.splitlines()[-1] == (
        "stratbench plan: needs the package torch: pip install torch torchvision"
    )
    assert (tmp_path / "compare/a+b/index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decide", "none.zip"], "none.zip does not exist"),
        (["decide", "paper:v2", "--config", "decide={gpus: none}"], "config: decide.gpus = 'none'"),
        (
            ["decide", "paper:v2", "--config", "gpus"],
            "is not KEY=VALUE; write it as in --config 'd",
        ),
        (["decide", "paper:v2", "--config", "decid={}"], "no key 'decid'. Did you mean 'decide'?"),
        (
            ["run", "--config", "study"],
            "is not KEY=VALUE; write it as in --config 'decide={gpus: 2}'",
        ),
        (["decide", "--config", "decide.gpus=1"], "write it as in --config 'decide={gpus: 1}'"),
        (
            ["decide", "--config", "decide={gpus:", "1}"],
            "decide={gpus:: the value {gpus: is not YAML",
        ),
        (["plan", "--config", "x=1"], "--config x=1: config.yaml has no key 'x'"),
        (["plan", "paper:v2"], "has no config to plan"),
        (["compare", "a=paper:v1"], "has a single set"),
        (["compare", "a=paper:v1", "paper:v2"], "each set needs its own name"),
        (["export", "paper:v2", "--to", "excel"], "--to excel: this is not a format; use parquet"),
        (["decide", "--out", "there"], "--out is only for a result set"),
        (["decide", "--jobs", "4"], "write the value of an option of Snakemake with ="),
        (["plan"], "no config.yaml is in this folder"),
        (["run", "--profile", "none"], "--profile none: is not a profile"),
        (["init", ".", "--quick"], "unknown arguments: --quick"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("study: a\nstudy: b\n", "config.yaml: study is given twice, in lines 1 and 2"),
        ("study:\n\ta: b\n", "config.yaml, line 2: the YAML is invalid"),
    ],
)
def test_a_mistake_in_the_config_beside_a_network_alone_is_one_sentence(
    tmp_path, monkeypatch, capsys, text, said
):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    assert main(["plan", "--model", "resnet50"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stratbench plan: {said}")
    assert error.count("\n") == 1


def test_each_target_of_the_workflow_is_a_subcommand(tmp_path, monkeypatch):
    """What Snakefile and documentation tell users of a clone, users of the package can do, too."""
    head = (ROOT / "Snakefile").read_text().partition("from snakemake")[0]
    targets = set(re.findall(r"^# +snakemake (?:-c1|--profile \S+) ([a-z]+)", head, re.M)) | {
        "links"
    }
    assert {"check", "partial", "project", "verdict"} < targets
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("")
    for target in targets:
        run = []
        monkeypatch.setattr(os, "execv", lambda _, command, run=run: run.extend(command))
        main([target, "--study", "mine", "--nolock"])
        assert run[run.index("--snakefile") + 2] == target
        assert "--nolock" in run
        assert run[run.index("--config") + 1] == "study=mine"
        assert ("--profile" in run) == (target in ("links", "verdict"))


def test_help_says_what_is_written_and_where_other_options_go(capsys):
    def told(*command):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    for command in ("run", "verdict", "plan", "decide", "check", "compare", "export", "bundle"):
        assert "all other options go to Snakemake" in told(command)
    assert "Snakemake" not in told("init")
    assert "STUDY.decision" in told("decide")  # as from_set.decide writes it
    assert "paper:v2" in told("decide")
    assert "STUDY.plan" in told("plan")
    assert "paper" not in told("plan")  # it has no config


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["out/decision.csv", "out"])
def test_what_is_decided_from_a_set_overwrites_nothing_of_others(tmp_path, capsys, kept):
    theirs = tmp_path / kept
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("mine")
    out = str(tmp_path / "out")
    assert main(["decide", "paper:v2", "--out", out]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"stratbench decide: {out} was not written by stratbench; name a folder that does not exist yet\n"
    )
    assert theirs.read_text() == "mine"
    for _ in range(2):  # its own it may write again
        assert main(["decide", "paper:v2", "--out", str(tmp_path / "ours")]) == 0


@pytest.mark.slow
def test_a_mistake_in_the_config_is_told_by_a_command_that_is_quiet_otherwise(tmp_path):
    (tmp_path / "config.yaml").write_text("study: mine\nstudies: {mine: {repeats: many}}\n")
    package = Path(__file__).parents[2] / "workflow"
    done = subprocess.run(
        [sys.executable, "-m", "stratbench.command", "decide"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(package)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert "config: studies.mine" in done.stderr
    assert "Building DAG" not in done.stderr
