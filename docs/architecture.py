"""Generates ARCHITECTURE.md and docs/modules.md from the packages' docstrings and their real imports.

    PYTHONPATH=workflow python docs/architecture.py

A test keeps the pages current. It fails when an import points up, when a wing imports another, when modules
import each other in a circle, and when a rule names a module or function that is not there.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from extensions import find_extension
from stratbench.cell.extensions import load_extensions

ROOT = Path(__file__).parents[1]
MADE_BY = "<!-- made by docs/architecture.py (make docs) -->"
PACKAGE = ROOT / "workflow" / "stratbench"
WINGS = ("train", "analysis")
#: The floors from top to bottom, each with its parts. A part imports from the floors below its own. The
#: wings never import each other; on the ground floor a part imports those before it.
FLOORS = [
    ("What the core runs without", ["extensions"]),
    ("The command line", ["command"]),
    ("The wings, one for each thing a user does", [*WINGS]),
    ("A config becomes cells", ["study"]),
    ("Ways to train with many workers", ["strategies"]),
    ("What everything rests on", ["report", "cell", "statistics", "workload", "telemetry"]),
]
#: The parts that train and record. They import none that plans, judges or shows.
MEASURING = ("report", "cell", "telemetry", "workload", "strategies", "study", "train")
#: It judges blocks by their evidence alone: it imports nothing that shows, nor is it imported by that.
PAIRED = "extensions.verdict.paired"
SHOWING = (
    "analysis",
    "extensions.verdict.full_runs",
    "extensions.verdict.paired_results",
    "extensions.verdict.reading",
    "extensions.verdict.section",
)
#: The most files side by side in a folder.
FLAT = 16
#: What no part may import, at the top of a file or inside a function.
NO_TORCH = (
    "analysis",
    "study",
    "cell",
    "statistics",
    "extensions.audit",
    "extensions.explore",
    "extensions.paper",
    "extensions.projection.shown",
    "extensions.sets",
    PAIRED,
)
#: The extensions that run beside training, and may import it.
TRAINING = ("checkpoints", "commands", "elastic", "links", "servers", "verdict")
#: The files that a newcomer reads first, in this order, and what each says.
FIRST_FILES = {
    "config.yaml": "the study `demo`: experiments, strategies, models, numbers of workers",
    "workflow/stratbench/cell/settings.py": "every setting that a cell is trained with, declared once",
    "workflow/stratbench/study/config/config.py": "validates config.yaml; a study becomes cells",
    "workflow/rules/train.smk": "one Snakemake job per cell, and the resources that it requests",
    "workflow/stratbench/train/launch.py": "one job; `running/runner.py` beside it runs the processes",
    "workflow/stratbench/train/worker.py": "one worker: joins its group, builds, warms up, trains",
    "workflow/stratbench/train/loop.py": "the timed loop: epochs, steps, phases, evaluation",
    "workflow/stratbench/strategies/base.py": "the protocol of a strategy; `ddp.py` beside it is an example",
    "workflow/stratbench/train/assemble.py": "workers' results become the record of the cell",
    "workflow/stratbench/analysis/records/columns.py": "records become the table that all pages read",
}
#: A module named in a string: to be imported by its name, or started as a command.
NAMED = re.compile(r"stratbench\.([\w.]+?)(:\w+)?")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `stratbench`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(
    path: Path, known: Iterable[str], package: str = "stratbench.", types: bool = False
) -> set[str]:
    """Of the modules of a package those that a file imports, wherever in it.

    A module named in a string counts, too (a registry's entry, a command to start). Imports for type
    checkers alone count only with `types`.
    """
    found = {
        name.removeprefix(package)
        for name in names_imported(path, path.read_text(encoding="utf-8"), types)
        if name.startswith(package) and name.removeprefix(package) in known
    }
    # `from stratbench.train import loop` names the package as well; the module is what is meant.
    return {f for f in found if not any(other.startswith(f"{f}.") for other in found)}


@cache
def names_imported(path: Path, text: str, types: bool = False) -> set[str]:
    """What a file of this text imports: modules, and what may be modules in them."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SystemExit(f"{path}:{node.lineno}: write the module's whole name")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and (named := NAMED.fullmatch(str(node.value))):
            found.add(f"stratbench.{named[1]}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(text))
    return found


def graph(types: bool = False) -> dict[str, set[str]]:
    """What each module imports; with `types` also what it imports for type checkers alone."""
    known = modules()
    return {name: imports(path, known, types=types) - {name} for name, path in known.items()}


def part_of(module: str) -> str:
    return module.split(".")[0]


def lies_in(module: str, *places: str) -> bool:
    """Whether a module is one of these parts, rooms or modules, or lies in one."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def unit_of(module: str) -> str:
    """The part of a module, or the extension that it belongs to."""
    name = find_extension(module)
    return part_of(module) if name is None else f"extensions.{name}"


def floor_of(part: str) -> int:
    """The floor of a part, 0 at the top."""
    for number, (_, parts) in enumerate(FLOORS):
        if part in parts:
            return number
    raise SystemExit(f"docs/architecture.py: {part} stands on no floor; add it to FLOORS")


def faults() -> list[str]:
    """What breaks the rules, in words."""
    return [*import_faults(), *rule_faults(), *crowded()]


def import_faults() -> list[str]:
    """Imports that run up, sideways between wings or in a circle, and imports of torch."""
    found = []
    edges = graph()
    for module, targets in edges.items():
        here = part_of(module)
        parts = FLOORS[floor_of(here)][1]
        may_train = here != "extensions" or find_extension(module) in TRAINING
        for target in sorted(targets):
            there = part_of(target)
            if floor_of(there) < floor_of(here):
                found.append(f"{module} imports {target}, which lies above it")
            elif there == "train" and not may_train:
                found.append(f"{module} imports {target}, which this extension does without")
            elif there in parts and there != here:
                if here in WINGS:
                    found.append(f"{module} imports {target}: wings do not import each other")
                elif parts.index(there) > parts.index(here):
                    found.append(f"{module} imports {target}, which comes after it on its floor")
    for module, path in modules().items():
        without = [p for p in NO_TORCH if lies_in(module, p)]
        if without and imports_torch(path):
            found.append(f"{module} imports torch, which {without[0]} does without")
    for module, targets in edges.items():
        for target in sorted(targets):
            pair = (module, target)
            if any(lies_in(a, PAIRED) and lies_in(b, *SHOWING) for a, b in (pair, pair[::-1])):
                found.append(f"{module} imports {target}: what passes is verdict.json")
            if part_of(module) in MEASURING and part_of(target) not in MEASURING:
                found.append(f"{module} imports {target}, which is no part that measures")
    found += circle(graph(types=True), "modules")
    found += circle(between_rooms(edges), "rooms")
    return found


def circle(edges: dict[str, set[str]], what: str) -> list[str]:
    """The circle in which modules or rooms import each other, if there is one."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as e:
        return [f"{what} import each other in a circle: {' -> '.join(e.args[1])}"]
    return []


def room_of(module: str) -> str:
    """The inner room of a module: its part and the folder in it; of a module outside one, itself."""
    unit = unit_of(module)
    names = module.split(".")[: unit.count(".") + 2]
    return ".".join(names) if (PACKAGE / Path(*names)).is_dir() else module


def between_rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports between inner rooms of one part."""
    found: dict[str, set[str]] = {}
    for module, targets in edges.items():
        here = room_of(module)
        there = {room_of(t) for t in targets if unit_of(t) == unit_of(module)}
        found.setdefault(here, set()).update(there - {here})
    return found


def crowded() -> list[str]:
    """Folders with more files than a reader can overlook."""
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    counts = {folder: len(list(folder.glob("*.py"))) for folder in folders}
    return [
        f"{folder.relative_to(PACKAGE.parent)} has {n} files; give some a room of their own"
        for folder, n in counts.items()
        if n > FLAT
    ]


def rules() -> list[Path]:
    """The files of the workflow that are no modules: Snakefiles and rules."""
    return sorted([*ROOT.glob("Snakefile"), *(ROOT / "workflow").glob("Snakefile")]) + sorted(
        (ROOT / "workflow" / "rules").glob("*.smk")
    )


def used_by(path: Path) -> tuple[set[str], set[str]]:
    """The names that a rules file imports from the package, and the modules it starts as commands."""
    text = path.read_text(encoding="utf-8")
    imported = {
        f"{module}.{name.split(' as ')[0].strip()}"
        for module, names in re.findall(r"^\s*from stratbench\.?([\w.]*) import (.+)$", text, re.M)
        for name in names.split(",")
    }
    return {name.strip(".") for name in imported}, set(re.findall(r"-m stratbench\.([\w.]+)", text))


def modules_named_by(path: Path) -> set[str]:
    """The modules that a rules file imports or starts; of an imported function its module."""
    known = modules()
    imported, commands = used_by(path)
    return commands | {name if name in known else name.rpartition(".")[0] for name in imported}


def rule_faults() -> list[str]:
    """What the rules import or start, and the package does not have."""
    known, found = modules(), []
    for path in rules():
        imported, commands = used_by(path)
        for name in sorted(imported - known.keys()):
            module, _, attribute = name.rpartition(".")
            if module not in known or attribute not in defined_in(known[module]):
                found.append(f"{path.name} imports {name}, which is not there")
        for module in sorted(commands):
            if module not in known and f"{module}.__main__" not in known:
                found.append(f"{path.name} starts {module}, which is not there")
    return found


def defined_in(path: Path) -> set[str]:
    """The names at the top of a module."""
    found = set()
    for node in parsed(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def imports_torch(path: Path) -> bool:
    """Whether a file imports torch anywhere but for type checkers."""
    return bool(imports(path, {"torch", "torchvision"}, package=""))


def docstring(path: Path) -> str:
    text = ast.get_docstring(parsed(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def arrows() -> dict[str, set[str]]:
    """For each part the other parts that it imports."""
    found: dict[str, set[str]] = {}
    for module, targets in graph().items():
        here = part_of(module)
        found.setdefault(here, set()).update({part_of(target) for target in targets} - {here})
    return found


def page() -> str:
    """The text of ARCHITECTURE.md."""
    between = arrows()
    n_arrows = sum(map(len, between.values()))
    parts = [part for _, parts in FLOORS for part in parts]
    lines = [
        "# Architecture",
        "",
        MADE_BY,
        "",
        "Read these ten files first, in this order. They take a cell from config.yaml to the tables.",
        "",
        *_first_files(),
        "",
        "Parameter servers are an extension: begin with `extensions/servers/strategy.py`.",
        "[docs/modules.md](docs/modules.md) lists every module.",
        "",
        "## Parts and floors",
        "",
        f"The {len(MEASURING)} parts that measure ({', '.join(f'`{part}`' for part in MEASURING)})",
        "import nothing of those that plan, judge and show: who changes the first need not know the others.",
        "",
        f"{len(parts)} parts on {len(FLOORS)} floors, with {n_arrows} arrows between them. "
        "Imports only point down.",
        "On the ground floor a part imports those before it. The wings never import each other: what passes",
        "between them is files, described by `workflow/schemas/`.",
        "Inside a part, folders import each other in no",
        f"circle, and none has more than {FLAT} files side by side.",
        f"{', '.join(f'`{part}`' for part in NO_TORCH)}",
        "never import torch. A test holds all of this.",
        "",
        "| floor | parts | what for |",
        "|---|---|---|",
        *(
            f"| {len(FLOORS) - n} | {', '.join(f'**{part}**' for part in parts)} | {title} |"
            for n, (title, parts) in enumerate(FLOORS)
        ),
        "",
        "Who imports whom: the part of the row imports the parts with an x.",
        "",
        *_matrix(parts, between),
        "",
        "The rules of the workflow import few modules, and start the others as commands:",
        "",
        "| file | imports | starts |",
        "|---|---|---|",
        *_rule_rows(),
        "",
    ]
    lines += ["## Extensions", "", *_extension_rows()]
    return "\n".join(lines).rstrip() + "\n"


def module_page() -> str:
    """The text of docs/modules.md: every module with the first paragraph of its docstring."""
    known = modules()
    lines = [
        "# Modules",
        "",
        MADE_BY,
        "",
        "Every module below `workflow/stratbench/`, from the command line down.",
        "",
    ]
    for n, (title, parts) in enumerate(FLOORS):
        lines += [f"## {len(FLOORS) - n}. {title}", ""]
        for part in parts:
            if part not in known:
                continue
            lines += [f"**`{part}`**: {docstring(known[part])}", ""]
            inner = {m: p for m, p in known.items() if m.startswith(f"{part}.")}
            lines += [f"- `{m.split('.', 1)[1]}`: {docstring(p)}" for m, p in inner.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _first_files() -> list[str]:
    missing = [name for name in FIRST_FILES if not (ROOT / name).is_file()]
    if missing:
        raise SystemExit(f"docs/architecture.py: FIRST_FILES names {missing}, which are not there")
    return [
        f"{n}. [{name}]({name}): {text}" for n, (name, text) in enumerate(FIRST_FILES.items(), 1)
    ]


def _extension_rows() -> list[str]:
    counts = Counter(map(find_extension, modules()))
    return [
        "The core runs without any of these, and imports none: `tests/whole/test_deleting.py` deletes each.",
        "An extension says in `workflow/stratbench/extensions/NAME` what it adds. To delete it, delete that",
        "folder, its line in `extensions/__init__.py`, its rules, its tests, and what needs it.",
        "",
        "| extension | what for | modules | needs | imports of the core |",
        "|---|---|--:|---|---|",
        *(
            f"| {name} | {e.summary} | {counts[name]} | {', '.join(e.required_extensions)} | "
            f"{', '.join(_core_parts(name))} |"
            for name, e in load_extensions().items()
        ),
        "",
        f"The core has {counts[None]} modules.",
    ]


def _core_parts(name: str) -> list[str]:
    """The parts of the core that the modules of an extension import."""
    targets = (
        t for module, all_ in graph().items() if find_extension(module) == name for t in all_
    )
    return sorted({part_of(t) for t in targets} - {"extensions"})


def _matrix(parts: list[str], between: dict[str, set[str]]) -> list[str]:
    columns = [there for there in parts if any(there in row for row in between.values())]
    marks = {
        here: ["x" if there in between.get(here, ()) else "" for there in columns] for here in parts
    }
    return [
        f"| | {' | '.join(columns)} |",
        "|---|" + ":-:|" * len(columns),
        *(f"| **{here}** | {' | '.join(row)} |" for here, row in marks.items()),
    ]


def _rule_rows() -> list[str]:
    rows = []
    for path in rules():
        _, commands = used_by(path)
        names = modules_named_by(path) - commands
        if names or commands:
            texts = [", ".join(f"`{name}`" for name in sorted(each)) for each in (names, commands)]
            rows.append(f"| `{path.relative_to(ROOT)}` | {texts[0]} | {texts[1]} |")
    return rows


if __name__ == "__main__":
    (ROOT / "ARCHITECTURE.md").write_text(page(), encoding="utf-8")
    (ROOT / "docs" / "modules.md").write_text(module_page(), encoding="utf-8")
