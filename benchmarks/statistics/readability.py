"""Measure how much of names, docstrings, comments, pages and messages is understood at first read.

    python benchmarks/statistics/readability.py draw --seed 2026 --to sheet.md
    python benchmarks/statistics/readability.py share reader-1.csv reader-2.csv --seed 2026

`draw` writes 340 items, drawn uniformly per kind, as a sheet for readers who do not know the project. Each
reader writes a CSV file with the columns `number` and `grade`. `share` prints the shares of each grade.

With `--beside snakemake torch.distributed`, both commands add as many items of these installed packages, of
the kinds that code has. The sheet is mixed and does not say which package an item is from.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "workflow/stratbench"
#: How many items of a kind are drawn; an item's number says its kind by this order.
COUNTS = {
    "function name": 80,
    "docstring": 80,
    "comment": 40,
    "paragraph of a page": 40,
    "error message": 14,
    "report sentence": 14,
    "help of an option": 6,
    "message of a rule": 6,
    "config key": 30,
    "field of a class": 30,
}
#: Kinds that every package has, for a sheet of several packages.
KINDS_OF_CODE = ("function name", "docstring", "comment", "error message", "field of a class")
#: Strings in these folders, and not raised, are sentences that a user reads.
REPORTING = ("analysis", "extensions/plan/pages", "extensions/sets/comparing", "report")
#: Pages that repeat docstrings.
FROM_DOCSTRINGS = ("modules.md",)
GRADES = "ABC"
INSTRUCTIONS = """# Readability sheet, seed {seed}

Grade each item by itself, without looking at the code or the documentation:

- **A**: understood at first read by an engineer who knows PyTorch, SLURM and statistics.
- **B**: needs a second read, or has an odd idiom.
- **C**: misleads, or the code has to be read.

Names are to be judged as a call site shows them. Comments come with the line of code that follows them.
Write one line per item into a CSV file with the header `number,grade,remark`.
"""


class Item(NamedTuple):
    """A text to grade, and the file that has it."""

    where: str
    text: str


def read_items() -> dict[str, list[Item]]:
    """Return the whole population of each kind."""
    items = read_items_of_package(PACKAGE)
    pages = [
        path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in FROM_DOCSTRINGS
    ]
    for path in [*pages, ROOT / "README.md"]:
        where = str(path.relative_to(ROOT))
        for text in iter_paragraphs(path.read_text(encoding="utf-8")):
            items["paragraph of a page"].append(Item(where, text))
    for path in sorted((ROOT / "workflow/rules").glob("*.smk")):
        texts = re.findall(r'message:\s+f?"([^"]+)"', path.read_text(encoding="utf-8"))
        items["message of a rule"] += [Item(path.name, text) for text in texts]
    schema = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text(encoding="utf-8"))
    items["config key"] = [Item("config.yaml", text) for text in sorted(set(iter_keys(schema)))]
    return items


def read_items_of_package(folder: Path) -> dict[str, list[Item]]:
    """Return all items in the Python files of a package, by kind."""
    items: dict[str, list[Item]] = {kind: [] for kind in COUNTS}
    for path in sorted(folder.rglob("*.py")):
        where = str(path.relative_to(folder))
        source = path.read_text(encoding="utf-8")
        for kind, text in [*iter_code(ast.parse(source), where), *iter_comments(source)]:
            items[kind].append(Item(where, text))
    return items


def iter_code(tree: ast.Module, where: str) -> Iterator[tuple[str, str]]:
    """Yield names, docstrings, fields and the strings that users read, each with its kind."""
    unread = _unread_strings(tree)
    class_by_method = {
        method: node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
    }
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            name = getattr(node, "name", "module")
            yield "docstring", f"{name}: {_first_paragraph(docstring)}"
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            yield "function name", render_signature(node, class_by_method.get(node, ""))
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(d) for d in node.decorator_list
        ):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    annotation = ast.unparse(field.annotation)
                    yield (
                        "field of a class",
                        f"{node.name}.{ast.unparse(field.target)}: {annotation}",
                    )
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = render(node.exc.args[0])
            if len(text.split()) > 3:
                yield "error message", text
        if isinstance(node, ast.keyword) and node.arg == "help" and (text := render(node.value)):
            yield "help of an option", text
        if where.startswith(REPORTING) and isinstance(node, ast.Constant | ast.JoinedStr):
            text = render(node)
            if (
                id(node) not in unread
                and len(text.split()) > 4
                and text[-1] in ".;:?"
                and "\n" not in text
            ):
                yield "report sentence", text


def render_signature(function: ast.FunctionDef, class_name: str) -> str:
    """Return a function as a call site shows it: a method with its class, a property without arguments.

    Args:
        function: The function.
        class_name: Class of a method. Empty for a function.
    """
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    name = f"{class_name}.{function.name}" if class_name else function.name
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    if any("property" in decorator for decorator in decorators):
        return f"{name}{returns}"
    arguments = ast.unparse(function.args)
    if class_name and "staticmethod" not in decorators:
        arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    return f"{name}({arguments}){returns}"


def _unread_strings(tree: ast.Module) -> set[int]:
    """Return the ids of strings that are docstrings, raised, parts of another, or help."""
    unread: set[int] = set()
    for node in ast.walk(tree):
        inside: list[ast.AST] = []
        if isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "help"):
            inside = list(ast.walk(node))
        elif isinstance(node, ast.JoinedStr):
            inside = [each for part in node.values for each in ast.walk(part)]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside = [node.value]
        unread |= {id(each) for each in inside}
    return unread


def render(node: ast.AST) -> str:
    """Return a string as the code has it, with `{expression}` where an f-string fills something in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else render(part)
            for part in node.values
        )
    return ""


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.split("\n\n")[0].split())


def iter_comments(source: str) -> Iterator[tuple[str, str]]:
    """Yield each comment, its lines joined, with the line of code that it is about."""
    lines = source.splitlines()
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#\s*(noqa|type:|fmt:|pragma)", token.string
        ):
            continue
        text, row = token.string.lstrip("#: "), token.start[0]
        if text.startswith("---"):  # a divider between parts of a file
            continue
        code = token.line[: token.start[1]].strip()
        following = lines[row].strip() if row < len(lines) else ""
        if code:
            yield "comment", f"{text}\n{code}"
        elif following.startswith("#"):
            block.append(text)
        else:
            yield "comment", " ".join([*block, text]) + f"\n{following}"
            block = []


def iter_paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of a page's text and lists, without tables, headings and code."""
    page = re.sub(r"```.*?```|~~~.*?~~~|<!--.*?-->", "\n\n", page, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*] )", page):
        text = " ".join(block.split())
        if len(text.split()) > 5 and not re.match(r"[#|!<:]|\[!", text):
            yield text


def iter_keys(rule: Any, name: str = "") -> Iterator[str]:
    """Yield each key of the schema that has a description, with it."""
    if isinstance(rule, list):
        for each in rule:
            yield from iter_keys(each)
    if not isinstance(rule, dict):
        return
    if name and isinstance(rule.get("description"), str):
        yield f"{name}: {rule['description']}"
    for key, below in rule.items():
        if key == "properties":
            for prop, each in below.items():
                yield from iter_keys(each, prop)
        else:
            yield from iter_keys(below)


class Drawn(NamedTuple):
    """An item of a sheet: its kind, the package that it is from, and the item."""

    kind: str
    source: str
    item: Item


def draw(seed: int, packages: list[str]) -> list[Drawn]:
    """Return the items of a sheet in their order, drawn without replacement.

    Args:
        seed: Seed of the draw.
        packages: Installed packages whose items are mixed with the project's.
    """
    chance = random.Random(seed)
    ours = read_items()
    if not packages:
        return [
            Drawn(kind, PACKAGE.name, item)
            for kind, items in ours.items()
            for item in chance.sample(items, COUNTS[kind])
        ]
    others = {name: read_items_of_package(find_package_folder(name)) for name in packages}
    drawn: list[Drawn] = []
    for kind in KINDS_OF_CODE:
        count = COUNTS[kind] // len(packages)
        mixed = [
            Drawn(kind, name, item._replace(where=""))
            for name, items in others.items()
            for item in chance.sample(items[kind], count)
        ]
        mixed += [
            Drawn(kind, PACKAGE.name, item._replace(where=""))
            for item in chance.sample(ours[kind], len(mixed))
        ]
        chance.shuffle(mixed)
        drawn += mixed
    return drawn


def find_package_folder(name: str) -> Path:
    """Return the folder of an installed package; raise ValueError if there is none."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"--beside {name}: no such package is installed; pip install it")
    return Path(spec.submodule_search_locations[0])


def format_sheet(seed: int, drawn: list[Drawn]) -> str:
    """Return the sheet for readers, as Markdown."""
    lines = [INSTRUCTIONS.format(seed=seed)]
    kind = ""
    for number, (next_kind, _, item) in enumerate(drawn, 1):
        if next_kind != kind:
            kind = next_kind
            lines.append(f"## {kind.capitalize()}\n")
        where = f" ({item.where})" if item.where else ""
        lines.append(f"**{number}**{where}\n\n````\n{item.text}\n````\n")
    return "\n".join(lines)


def read_grades(path: Path, count: int) -> dict[int, str]:
    """Return a reader's grades by item; raise ValueError if one of `count` is missing or unknown."""
    with path.open(encoding="utf-8", newline="") as file:
        grades = {int(row["number"]): row["grade"].strip().upper() for row in csv.DictReader(file)}
    wrong = [n for n in range(1, count + 1) if grades.get(n, "") not in [*GRADES]]
    if wrong:
        raise ValueError(f"{path}: items {wrong[:10]} have no grade A, B or C; grade every item")
    return grades


def wilson_interval(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share."""
    middle, half = hits + z * z / 2, z * (hits * (n - hits) / n + z * z / 4) ** 0.5
    return (middle - half) / (n + z * z), (middle + half) / (n + z * z)


def format_shares(readers: list[dict[int, str]], drawn: list[Drawn]) -> str:
    """Return a Markdown table of the shares of A, B and C per kind, one mean of all readers.

    The interval is that of as many items as were drawn: several readers of an item are not more items.

    Args:
        readers: Grades by item, per reader.
        drawn: Items of the sheet.
    """
    rows = ["| kind | n | A | B | C | all readers say A |", "|---|--:|---|--:|--:|--:|"]
    numbers_by_row: dict[str, list[int]] = {}
    several = len({each.source for each in drawn}) > 1
    for number, (kind, source, _) in enumerate(drawn, 1):
        row = f"{kind}, {source}" if several else kind
        numbers_by_row.setdefault(row, []).append(number)
    for source in dict.fromkeys(each.source for each in drawn):
        row = f"all, {source}" if several else "all"
        numbers_by_row[row] = [n for n, each in enumerate(drawn, 1) if each.source == source]
    for row, numbers in numbers_by_row.items():
        n = len(numbers)
        share = {
            grade: sum(reader[i] == grade for reader in readers for i in numbers) / n / len(readers)
            for grade in GRADES
        }
        low, high = wilson_interval(round(share["A"] * n), n)
        agreed = sum(all(reader[i] == "A" for reader in readers) for i in numbers) / n
        rows.append(
            f"| {row} | {n} | {share['A']:.0%} [{low:.0%}, {high:.0%}] | {share['B']:.0%} "
            f"| {share['C']:.0%} | {agreed:.0%} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Draw a sheet, or print the shares of graded ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="write a sheet of items to grade")
    drawing.add_argument("--to", type=Path, required=True, help="Markdown file to write")
    sharing = commands.add_parser("share", help="print the share of each grade per kind")
    sharing.add_argument("graded", type=Path, nargs="+", help="CSV file of a reader's grades")
    for command in (drawing, sharing):
        command.add_argument("--seed", type=int, required=True, help="seed of the draw")
        command.add_argument(
            "--beside",
            nargs="+",
            default=[],
            metavar="PACKAGE",
            help="installed packages to mix in",
        )
    args = parser.parse_args()
    try:
        drawn = draw(args.seed, args.beside)
        if args.command == "draw":
            args.to.write_text(format_sheet(args.seed, drawn), encoding="utf-8")
        else:
            readers = [read_grades(path, len(drawn)) for path in args.graded]
            print(format_shares(readers, drawn))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
