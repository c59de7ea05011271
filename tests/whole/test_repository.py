"""The repository's own promises: layers, pins, and pages that are generated."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import snakemake
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import architecture  # noqa: E402
import command_tables  # noqa: E402
import config_tables  # noqa: E402
import record_tables  # noqa: E402
from stratbench.cell.record import SCHEMA_PATH  # noqa: E402
from stratbench.strategies import REGISTRY, get_strategy_class  # noqa: E402
from stratbench.study.config.schema import (  # noqa: E402
    build_config_schema,
    check_config_structure,
    parse_texts_by_schema,
)


def pins(path: str) -> set[str]:
    lines = (ROOT / path).read_text().splitlines()
    return {line.strip().lower() for line in lines if line and not line.startswith("#")}


@pytest.mark.slow
def test_imports_point_down_and_wings_stay_apart():
    assert architecture.faults() == []


@pytest.mark.parametrize(
    ("module", "target", "reason"),
    [
        ("strategies.ddp", "train.loop", "which lies above it"),
        ("extensions.plan.footprint.cache", "train.loop", "which this extension does without"),
        ("cell.record", "telemetry.machine.cores", "which comes after it on its floor"),
        (
            "extensions.verdict.paired.noise",
            "analysis.tables.summary",
            "what passes is verdict.json",
        ),
        (
            "extensions.verdict.paired_results",
            "extensions.verdict.paired.lines",
            "what passes is verdict.json",
        ),
        ("analysis.tables.summary", "train.loop", "wings do not import each other"),
        ("train.loop", "statistics.moderated", "which is no part that measures"),
    ],
)
def test_an_import_up_or_sideways_is_found(monkeypatch, module, target, reason):
    edges = {module: {target}, target: set()}
    monkeypatch.setattr(architecture, "graph", lambda types=False: edges)
    [fault] = architecture.faults()
    assert fault.startswith(f"{module} imports {target}")
    assert reason in fault


def test_a_circle_of_types_or_of_rooms_is_found(monkeypatch):
    types = {
        "cell.record": {"extensions.verdict.blocks"},
        "extensions.verdict.blocks": {"cell.record"},
    }
    monkeypatch.setattr(
        architecture, "graph", lambda types=False, all_=types: all_ if types else {}
    )
    assert "modules import each other in a circle" in " ".join(architecture.import_faults())
    rooms = {
        "train.nodes.srun": {"train.beside.beside"},
        "train.beside.profile": {"train.nodes.paused"},
    }
    monkeypatch.setattr(architecture, "graph", lambda types=False: rooms)
    [fault] = architecture.import_faults()
    assert fault.startswith("rooms import each other in a circle: train.")


def test_a_crowded_folder_is_found(monkeypatch):
    monkeypatch.setattr(architecture, "FLAT", 13)
    assert any(fault.startswith("stratbench/train has") for fault in architecture.crowded())


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from stratbench.train import loop", {"train.loop"}),
        ("def f():\n    import stratbench.train.loop", {"train.loop"}),
        ("REGISTRY = {'x': 'stratbench.strategies.ddp:DDP'}", {"strategies.ddp"}),
        ("command = [python, '-m', 'stratbench.train.loop']", {"train.loop"}),
        ("import_module('stratbench.train.loop')", {"train.loop"}),
        ("if TYPE_CHECKING:\n    from stratbench.train import loop", set()),
        ("'see stratbench.train.loop'", set()),
    ],
)
def test_imports_are_found_wherever_they_stand(tmp_path, code, found):
    path = tmp_path / "some.py"
    path.write_text(code)
    assert architecture.imports(path, architecture.modules()) == found


def test_a_relative_import_is_refused(tmp_path):
    path = tmp_path / "some.py"
    path.write_text("from .loop import train")
    with pytest.raises(SystemExit, match="whole name"):
        architecture.imports(path, architecture.modules())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "from stratbench.extensions.plan.device_rates import Gone",
            "x.smk imports extensions.plan.device_rates.Gone",
        ),
        ("from stratbench.study import gone", "x.smk imports study.gone"),
        ('shell: "python -m stratbench.train.gone --x"', "x.smk starts train.gone"),
        (
            "from stratbench.study import config as c\nshell: 'python -m stratbench.extensions.plan'",
            None,
        ),
    ],
)
def test_what_a_rule_names_is_there(tmp_path, monkeypatch, text, fault):
    path = tmp_path / "x.smk"
    path.write_text(text)
    monkeypatch.setattr(architecture, "rules", lambda: [path])
    found = architecture.rule_faults()
    assert found == ([] if fault is None else [f"{fault}, which is not there"])


IMPORT = re.compile(r"from stratbench\.([\w.]+) import (\([^)]+\)|[^\n;]+)")


def imported_names(code: str) -> set[tuple[str, str]]:
    """Return the modules and names that a program imports from the package."""
    return {
        (module, name)
        for module, names in IMPORT.findall(code)
        for name in re.findall(r"(?:^|,)\s*(\w+)", names.strip("()"))
    }


def missing_names(code: str) -> list[str]:
    known = architecture.modules()
    return [
        f"{module}.{name}"
        for module, name in sorted(imported_names(code))
        if f"{module}.{name}" not in known
        and not (module in known and name in architecture.defined_in(known[module]))
    ]


def written_programs() -> dict[str, str]:
    """Return programs that tests, benchmarks and pages hold as text: code that no type checker reads."""
    programs = {}
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "from stratbench." in text and path != Path(__file__):
                programs[f"{path.relative_to(ROOT)}:{node.lineno}"] = text
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        blocks = re.findall(r"^```python$(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)
        programs |= {f"{path.relative_to(ROOT)}#{i}": text for i, text in enumerate(blocks)}
    return programs


def test_written_programs_import_what_is_there():
    programs = written_programs()
    assert len(programs) > 20
    missing = {place: missing_names(text) for place, text in programs.items()}
    assert {place: names for place, names in missing.items() if names} == {}
    assert missing_names("from stratbench.study import gone") == ["study.gone"]
    assert missing_names("from stratbench.cell.record import SCHEMA_PATH") == []


def test_an_import_of_torch_is_found(tmp_path):
    path = tmp_path / "some.py"
    path.write_text("def f():\n    from torch import nn\n")
    assert architecture.imports_torch(path)
    path.write_text("if TYPE_CHECKING:\n    import torch\n")
    assert not architecture.imports_torch(path)


def test_architecture_pages_are_current():
    assert (ROOT / "ARCHITECTURE.md").read_text() == architecture.page(), "run: make docs"
    assert (ROOT / "docs/modules.md").read_text() == architecture.module_page(), "run: make docs"


@pytest.mark.parametrize(
    "path", config_tables.generated_pages(), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_a_generated_page_is_current(path):
    text = config_tables.generated_pages()[path]
    assert path.read_text(encoding="utf-8") == text, "run: make docs"


@pytest.mark.parametrize(
    ("page", "tables"),
    [
        (record_tables.PAGE, record_tables.field_tables),
        (command_tables.PAGE, command_tables.command_tables),
    ],
)
def test_the_tables_of_a_page_are_current(page, tables):
    assert page.read_text(encoding="utf-8") == config_tables.fill(page, tables()), "run: make docs"


def test_every_key_of_a_block_is_in_its_example():
    for block, rule in config_tables.block_rules().items():
        example = config_tables.example_of(block)
        for title, keys, _ in config_tables.iter_blocks("", {"properties": {block: rule}}):
            missing = [key for key in keys if not re.search(rf"\b{key}:", example)]
            assert missing == [], f"{title}: give {config_tables.EXAMPLES} a line per key"


def test_the_example_of_every_key_is_valid():
    raw = yaml.safe_load(config_tables.EXAMPLES.read_text(encoding="utf-8"))
    check_config_structure(parse_texts_by_schema(raw, build_config_schema()))


def test_every_strategy_is_on_one_page_and_its_example_is_valid():
    listed = [name for names in config_tables.FAMILIES.values() for name in names]
    assert sorted(listed) == sorted(REGISTRY)
    for family, names in config_tables.FAMILIES.items():
        page = (ROOT / f"docs/reference/strategies/{family}.md").read_text(encoding="utf-8")
        example = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
        for name, variant in example["variants"].items():
            options = {key: value for key, value in variant.items() if key != "strategy"}
            assert variant["strategy"] in names, name
            get_strategy_class(variant["strategy"]).Options(**options)


def test_every_field_of_the_record_has_a_row():
    properties = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))["properties"]
    page = record_tables.field_tables()
    for part in ("batch", "time", "compute", "communication", "energy", "memory", "score"):
        for name in properties[part]["properties"]:
            assert f"| `{name}` |" in page


def test_tables_say_of_every_option_what_it_takes_and_means_in_words():
    page = config_tables.strategy_tables("sharded")
    row = next(line for line in page.splitlines() if "| `shard_group_size` |" in line)
    strategy, _, value, default, meaning = (cell.strip() for cell in row.strip("|").split("|"))
    assert (strategy, default) == ("`fsdp`", '`"all"`')
    assert value == "a whole number, at least 1; or `all`, `node`"
    assert meaning.startswith("number of workers among which one model is sharded")
    servers = config_tables.strategy_tables("servers")
    assert servers.count("`transport`") == 1, "what all servers share is told once"
    pages = "".join(config_tables.generated_pages().values())
    assert "| `text` | text or a list (text) |" in pages
    assert "typing." not in pages


def test_tables_are_put_between_the_marks_of_their_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"before\n{config_tables.TABLE_BEGIN}\nSTALE\n{config_tables.TABLE_END}\nafter\n"
    )
    text = config_tables.fill(page, "| `lr` |\n")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `lr` |" in text
    assert "STALE" not in text


def test_the_conda_environment_has_the_pins_of_the_requirements():
    environment = yaml.safe_load((ROOT / "envs/stratbench.yaml").read_text())
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert set(pip) == pins("envs/requirements.txt")


def test_what_a_strategy_needs_has_its_pin():
    """By the distribution's name, in the way that its message names it."""
    for name in REGISTRY:
        for pin in get_strategy_class(name).needs:
            distribution = pin.partition("==")[0]
            assert pin in pins(f"envs/requirements-{distribution}.txt")


def test_every_requirement_is_pinned_exactly_and_constrained_alike():
    constraints = pins("envs/constraints.txt")
    for kind in ("", "-dev", "-analysis", "-deepspeed", "-transformers", "-docs"):
        path = f"envs/requirements{kind}.txt"
        for pin in pins(path):
            assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin), f"{path}: {pin}"
            assert pin.replace("_", "-") in {c.replace("_", "-") for c in constraints}, pin


def test_the_gpu_path_is_tested_with_the_same_versions():
    """With ===, so that pip takes no local build of PyTorch for the CPU."""
    lines = pins("envs/requirements-gpu-path.txt")
    assert {line for line in lines if line.startswith("-r")} == {
        "-r requirements.txt",
        "-r requirements-dev.txt",
    }
    exactly = {line.replace("===", "==") for line in lines if "===" in line}
    assert {line.partition("==")[0] for line in exactly} == {"torch", "torchvision"}
    assert exactly <= pins("envs/requirements.txt")


def test_snakemakes_report_finds_its_packages_among_the_requirements():
    """`snakemake --report` imports some that Snakemake itself does not ask for."""
    found, left = set(), [pin.partition("==")[0] for pin in pins("envs/requirements.txt")]
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            asked = map(Requirement, requires(name) or ())
            left += [r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    imported = set()
    for path in Path(snakemake.__file__).parent.glob("report/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    owners = packages_distributions()
    needed = {canonicalize_name(owners[name][0]) for name in imported if name in owners}
    assert {"pygments", "jinja2"} <= needed
    assert needed <= found, "pin them in envs/"


def test_every_rule_names_its_environment():
    for path in (ROOT / "workflow/rules").glob("*.smk"):
        for rule in re.split(r"\nrule ", path.read_text())[1:]:
            if "shell:" in rule:
                named = re.search(r"conda:\s+ENV\n", rule)
                assert named, f"{path.name}: rule {rule.splitlines()[0]}"


@pytest.mark.slow
def test_only_tests_use_mocks():
    found = [
        str(path.relative_to(ROOT))
        for folder in ("workflow", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if architecture.imports(path, {"unittest", "unittest.mock"}, package="")
    ]
    assert found == []


def text_files_opened_by_locale(source: str) -> list[int]:
    """Lines that open a file as text without saying its encoding: the user's locale would decide."""
    found = []
    for node in ast.walk(architecture.parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        owner = getattr(getattr(node.func, "value", None), "id", None)
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if name not in ("open", "fdopen", "read_text", "write_text"):
            continue
        if (owner, name) in {
            ("os", "open"),
            ("tarfile", "open"),
            ("archive", "open"),
            ("Image", "open"),
        }:
            continue
        keywords = {k.arg for k in node.keywords}
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if "encoding" not in keywords and not any("b" in m for m in modes if isinstance(m, str)):
            found.append(node.lineno)
    return found


@pytest.mark.slow
def test_text_files_are_utf_8_whatever_the_locale():
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in ("workflow", "benchmarks", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := text_files_opened_by_locale(path.read_text(encoding="utf-8")))
    }
    assert found == {}, 'say encoding="utf-8"'


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("p.read_text()", [1]),
        ("p.write_text(x)", [1]),
        ("with open(p) as f: pass", [1]),
        ("p.open('x')", [1]),
        ("os.fdopen(d, 'w')", [1]),
        ("p.open('wb'); open(p, 'rb'); os.open(p, 0); p.read_text(encoding='utf-8')", []),
    ],
)
def test_a_text_file_opened_by_locale_is_found(code, lines):
    assert text_files_opened_by_locale(code) == lines


def test_the_page_of_policies_has_each_strategys_own_rule():
    page = (ROOT / "docs/parameter-server-policies.md").read_text(encoding="utf-8")
    table = page.partition("## Learning rate")[0]
    served = [name for name in REGISTRY if get_strategy_class(name).kind == "server"]
    assert len(served) >= 10
    for name in served:
        rule = get_strategy_class(name).rule.replace("|", "\\|")
        assert rule
        assert f"| `{name}` | {rule} |" in table
