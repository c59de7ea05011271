"""The core imports no extension: each is deleted from a copy of the workflow, which then runs without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow/stratbench"
sys.path.insert(0, str(ROOT / "docs"))

import architecture  # noqa: E402
import extensions  # noqa: E402
from launching import settings  # noqa: E402
from stratbench.cell.extensions import load_extensions  # noqa: E402
from stratbench.cell.run_folder import RunFolder  # noqa: E402
from stratbench.cell.settings import Settings  # noqa: E402
from stratbench.train.job import Job  # noqa: E402
from stratbench.workload.data.prepared import read_verified_metadata  # noqa: E402


@cache
def all_imports() -> dict[str, set[str]]:
    """Modules and rules files, each with the modules that it imports or starts."""
    imports = {name: set(targets) for name, targets in architecture.graph().items()}
    for path in architecture.rules():
        names = architecture.modules_named_by(path)
        imports[path.name] = imports.get(path.name, set()) | names
    return imports


@pytest.mark.slow
def test_no_import_forbids_deleting_an_extension():
    assert extensions.find_forbidden(all_imports()) == [], (
        "let the extension register itself instead"
    )


def test_tests_of_the_core_name_no_extension():
    """So that they pass where extensions were deleted: slow ones, too, which no copy runs."""
    named = [
        f"{path.name}: {name}"
        for path in sorted((ROOT / "tests/core").glob("*.py"))
        for name in re.findall(
            r"^(?:(?:from|import) stratbench\.|.*[\"'].*\b)extensions[./]\w+",
            path.read_text(),
            re.M,
        )
    ]
    assert not named


def test_extensions_need_each_other_in_no_circle():
    order = TopologicalSorter(
        {name: e.required_extensions for name, e in load_extensions().items()}
    ).static_order()
    folders = {path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")}
    assert set(order) == load_extensions().keys() == folders


@pytest.mark.parametrize("name", load_extensions())
def test_an_extension_names_rules_that_exist(name):
    rules = {path.name for path in architecture.rules()}
    assert set(load_extensions()[name].rule_files) <= rules


@pytest.mark.parametrize(
    ("importer", "imported", "is_forbidden"),
    [
        ("train.loop", "extensions.checkpoints.keeping", True),
        ("strategies", "extensions.deepspeed.strategy", True),
        ("common.smk", "extensions.plan.device_rates", True),
        ("extensions.plan.check", "extensions.projection.study", True),
        ("extensions.projection.study", "extensions.plan.check", False),
        ("extensions.verdict.paired.noise", "statistics.moderated", False),
        ("train.loop", "train.job", False),
        ("plan.smk", "extensions.plan", False),
    ],
)
def test_imports_are_judged_by_who_may_be_deleted(importer, imported, is_forbidden):
    found = extensions.find_forbidden({importer: {imported}})
    assert found == ([f"{importer} -> {imported}"] if is_forbidden else [])


# ---------------------------------------------------------------- deleting from a copy

#: Loads each study of config.yaml alone, in each folder that its arguments name. Prints by folder and study
#: the settings of cells, or why the study is refused. What all folders need is imported once; each is then
#: read by a process that is forked from this one.
LOADS = """
import json, os, sys
import fastjsonschema, jsonschema, yaml

def load(folder):
    sys.path.insert(0, folder + "/workflow")
    from stratbench.study.config.config import load_config
    from stratbench.study.config.messages import ConfigError
    raw, found = yaml.safe_load(open(folder + "/config.yaml")), {}
    for name, study in raw["studies"].items():
        # Repeats differ in their seeds alone.
        given = raw | {"study": name, "studies": {name: study | {"repeats": 1}}}
        try:
            _, loaded = load_config(given)
            found[name] = [loaded.settings(cell).as_json() for cell in loaded.cells]
        except ConfigError as error:
            found[name] = str(error)
    return found

for folder in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        print(json.dumps([folder, load(folder)]), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, folder
"""


def with_those_that_need(name: str) -> set[str]:
    """An extension, and all that cannot be without it."""
    gone = {name}
    for _ in load_extensions():
        gone |= {
            other for other, e in load_extensions().items() if gone & set(e.required_extensions)
        }
    return gone


#: Of each extension, all that goes with it.
WHOLE = {name: with_those_that_need(name) for name in load_extensions()}


#: What another process is about to compile.
UNFINISHED = shutil.ignore_patterns("*.pyc.*")


def copy_without(gone: set[str], root: Path) -> None:
    """Copy the workflow without some extensions to a folder; what is compiled stays so."""
    for name in ("workflow", "profiles", "envs"):
        shutil.copytree(ROOT / name, root / name, ignore=UNFINISHED)
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(ROOT / name, root)
    package = root / "workflow/stratbench"
    listed = package / "extensions/__init__.py"
    for name in gone:
        shutil.rmtree(package / "extensions" / name)
        for file in load_extensions()[name].rule_files:
            (root / "workflow/rules" / file).unlink()
        text, count = re.subn(f'    "{name}",\n', "", listed.read_text(encoding="utf-8"))
        assert count == 1
        listed.write_text(text, encoding="utf-8")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, on the package that lies in it."""
    environment = os.environ | {
        "PYTHONPATH": str(folder / "workflow"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, check=False
    )


#: Of an extension: what a config has that needs it, and how the config is refused.
NEEDING: dict[str, tuple[dict[str, Any], str]] = {
    "libraries": (
        {"models": {"mine": {"transformers": "LlamaForCausalLM"}}},
        "models.mine.transformers = 'LlamaForCausalLM': needs the extension `libraries`, which "
        "this installation does not have; restore it, or build the model by a function of your own "
        "(`call`)",
    ),
    "labelled": (
        {"datasets": {"mine": {"waveforms": "sounds"}}},
        "datasets.mine: data set 'mine': waveforms: needs the extension `labelled`, which this "
        "installation does not have; restore it, or return arrays by a function of your own (`call`)",
    ),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, dict[str, list[str] | str]]:
    """What LOADS says of the workflow, of it without each extension, and of each config of NEEDING."""
    root = tmp_path_factory.mktemp("without")
    folders = {"": ROOT} | {name: root / name for name in WHOLE}
    for name, gone in WHOLE.items():
        copy_without(gone, folders[name])
    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config["studies"] = {"demo": config["studies"]["demo"]}
    for name, (entries, _) in NEEDING.items():
        asked = folders[f"{name} is needed"] = root / f"{name} is needed"
        asked.mkdir()
        (asked / "workflow").symlink_to(folders[name] / "workflow")
        given = config | {block: config.get(block, {}) | added for block, added in entries.items()}
        (asked / "config.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    done = run(root, "-c", LOADS, *map(str, folders.values()))
    assert done.returncode == 0, done.stderr
    found = dict(map(json.loads, done.stdout.splitlines()))
    return {name: found[str(folder)] for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_without_an_extension_a_study_trains_the_same_or_is_refused(name, loaded):
    strategies = {s for gone in WHOLE[name] for s in load_extensions()[gone].strategies}
    for study, found in loaded[name].items():
        if isinstance(found, str):
            named = re.findall(r" = '(.+?)': is not a strategy", found)
            assert named
            assert set(named) <= strategies
        else:
            assert found == loaded[""][study], "deleting an extension would train cells anew"


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDING)
def test_what_needs_a_deleted_extension_is_refused_in_a_sentence(name, loaded):
    assert loaded[f"{name} is needed"] == {"demo": f"config: {NEEDING[name][1]}"}


@pytest.mark.slow
def test_without_any_extension_the_demo_is_planned_and_reported(tmp_path):
    copy_without(set(load_extensions()), tmp_path)
    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    demo, strategies = (
        config["studies"]["demo"],
        {s for e in load_extensions().values() for s in e.strategies},
    )
    for experiment in demo["experiments"].values():
        experiment["strategies"] = [s for s in experiment["strategies"] if s not in strategies]
    config["studies"] = {"demo": demo}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    planned = run(tmp_path, "-m", "snakemake", "-n")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert re.search(r"^train_cell +\d+$", planned.stdout, re.M)
    reported = run(tmp_path, "-m", "snakemake", "-c1", "partial")
    assert reported.returncode == 0, reported.stdout + reported.stderr
    assert (tmp_path / "results/demo/partial/report.html").exists()
    assert run(tmp_path, "-m", "stratbench.command", "--help").returncode == 0


def reached_from(path: Path) -> set[str]:
    """Modules of the package that a file of tests and its helpers import, and all that these import."""
    imports, known = all_imports(), architecture.modules()
    helpers = {
        p.stem: p for p in (*(ROOT / "tests").glob("*.py"), *(ROOT / "tests/core").glob("*.py"))
    }
    files, reached = [path], set()
    for file in files:  # it grows meanwhile
        reached |= architecture.imports(file, known)
        named = architecture.names_imported(file, file.read_text(encoding="utf-8"))
        files += [p for name, p in helpers.items() if name in named and p not in files]
    left = list(reached)
    while left:
        more = imports.get(left.pop(), set()) - reached
        reached |= more
        left += more
    return reached


def files_that_extensions_reach() -> list[str]:
    """Files of the core's tests with code that asks which extensions there are.

    `workload` asks only for what a config names of them: NEEDING has both cases.
    """
    asking = {name for name, targets in all_imports().items() if "cell.extensions" in targets}
    asking = {name for name in asking if not name.startswith(("workload.", "extensions."))}
    files = sorted((ROOT / "tests/core").glob("test_*.py"))
    return [f"tests/core/{path.name}" for path in files if asking & reached_from(path)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_core_passes_its_quick_tests_without_any_extension(tmp_path):
    """A test that names a key of an extension belongs to the tests of that extension."""
    copy_without(set(load_extensions()), tmp_path)
    for name in ("docs", "benchmarks/statistics", "tests/core"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=UNFINISHED)
    for path in (ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    files = files_that_extensions_reach()
    assert {"tests/core/test_config.py", "tests/core/test_launch.py"} < set(files)
    done = run(tmp_path, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:xdist", *files)
    assert done.returncode == 0, done.stdout


def test_the_declaration_in_the_docs_is_that_of_the_code():
    code = (ROOT / "workflow/stratbench/extensions/checkpoints" / "__init__.py").read_text()
    page = (ROOT / "docs" / "reference" / "extension-api.md").read_text()
    assert code[code.index("EXTENSION = ") :] in page


# ---------------------------------------------------------------- the record of a plain cell

#: Prints the record that is made of a job's run folder, by a clock that stands.
RECORDS = """
import json, sys
from datetime import datetime
from types import SimpleNamespace
from stratbench.train import assemble, job
from stratbench.train.ending import CellEnding
job.time = SimpleNamespace(monotonic=lambda: 100.0)
assemble.datetime = SimpleNamespace(
    now=lambda zone: datetime.fromtimestamp(100, zone), fromtimestamp=datetime.fromtimestamp
)
assemble.read_git_state = lambda root: {}
print(json.dumps(assemble.make_record(job.Job.from_json(sys.argv[1]), CellEnding("ok", None))))
"""


def shape_of(value: object) -> object:
    """The keys of nested dicts, in their order."""
    if isinstance(value, dict):
        return [(key, shape_of(inner)) for key, inner in value.items()]
    return [shape_of(inner) for inner in value] if isinstance(value, list) else None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_record_of_a_plain_cell_is_the_same_without_extensions(start_cell, tiny_data, tmp_path):
    bare = tmp_path / "bare"
    copy_without(set(load_extensions()), bare)
    launched = start_cell(settings("ddp", epochs=1), workflow=bare / "workflow")
    launched.record.parent.mkdir(parents=True)
    launched.finish_with(0)
    trained = json.loads(launched.record.read_text(encoding="utf-8"))
    trained["provenance"]["git"] = {}
    job = Job(
        cell=launched.cell, settings=Settings.from_recorded_values(trained["settings"]), data_dir=tiny_data,
        data=read_verified_metadata(tiny_data), folder=RunFolder.from_log_dir(launched.logs),
        workers_per_node=2, use_cuda=False, threads=1, origin_unix_s=0.0, origin_s=0.0,
        time_limit_s=None,
    )  # fmt: skip
    made = [run(folder, "-c", RECORDS, job.to_json()) for folder in (ROOT, bare)]
    assert made[0].returncode == 0, made[0].stderr
    assert made[0].stdout == made[1].stdout, made[1].stderr
    assert shape_of(json.loads(made[0].stdout)) == shape_of(trained)
