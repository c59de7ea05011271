"""The field's words: house words become fewer, class names are unique, docstrings and names follow ruff."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: House word -> the field's word, and how often it is still used. Lower a number when some are
#: replaced.
HOUSE_WORDS = {
    "bout": ("comparison", 0),
    "race": ("paired comparison", 1),
    "raced": ("compared", 0),
    "stranger": ("foreign process", 0),
    "tenant": ("foreign process", 0),
    "pulse": ("heartbeat", 0),
    "MOST_": ("MAX_", 0),
    "LEAST_": ("MIN_", 0),
    "alike": ("equal, similar", 50),
    "anew": ("from scratch", 29),
    "asked": ("requested, request", 49),
    "beside": ("next to, besides, concurrently", 81),
    "counted": ("pluralize", 135),
    "course": ("analysis", 7),
    "doubt": ("caveat, warning", 28),
    "found": ("matches, results, candidates", 128),
    "given": ("args, constraints, options", 147),
    "judge": ("evaluate", 16),
    "judged": ("evaluated", 31),
    "kappa": ("compute slowdown", 11),
    "kept": ("saved, retained", 121),
    "lacking": ("missing", 13),
    "misfit": ("residual", 4),
    "nobody": ("no process, no one", 28),
    "outside": ("external", 60),
    "rehearsal": ("dry run", 5),
    "rival": ("alternative", 42),
    "said": ("reported", 30),
    "scatter": ("standard deviation", 64),
    "seal": ("checksum", 7),
    "settled": ("completed", 47),
    "standing": ("status", 13),
    "stands": ("is, is stored", 16),
    "stated": ("declared", 20),
    "tell": ("report, print", 28),
    "told": ("reported, message", 51),
    "unheld": ("unsatisfiable", 4),
    "unlike": ("mismatch", 16),
    "whoever": ("the process that", 3),
    "why": ("reason", 154),
    "worth": ("sample efficiency", 38),
}
#: Classes that bear the name of what another program calls them.
NAMED_BY_OTHERS = {"ReportCallback"}
#: Findings of ruff that are left, by rules that pyproject.toml ignores. Lower a number when some are mended.
LEFT_BY_RUFF = {
    "D102": 331,
    "D103": 19,
    "D105": 35,
    "D106": 22,
    "D107": 88,
    "D205": 37,
    "D417": 0,
    "N818": 20,
}

#: Words that a function's docstring does not begin with: it says what it does, or a property what it is.
NO_VERBS = {
    *(
        "As",
        "At",
        "By",
        "For",
        "From",
        "How",
        "If",
        "In",
        "It",
        "Its",
        "Nor",
        "Of",
        "On",
        "Once",
        "Than",
    ),
    *(
        "This",
        "Those",
        "Until",
        "What",
        "When",
        "Where",
        "Whether",
        "Which",
        "Who",
        "Whoever",
        "Why",
    ),
    *("With", "Without"),
}
MAX_FIRST_WORDS, MAX_WORDS, MIN_DESCRIBED = 15, 25, 3
#: Docstrings that are left, and sentences of docstrings and pages. Lower a number when some are mended.
LEFT_IN_TEXTS = {
    "docstrings of functions that begin with no verb": 2,
    "docstrings whose first sentence has over 15 words": 0,
    "public functions of three or more parameters without Args": 37,
    "sentences of docstrings with over 25 words": 23,
    "sentences of docstrings that begin with Of, What or Who": 2,
    "sentences of pages with over 25 words": 44,
    "sentences of pages that begin with Of, What or Who": 4,
}


def count_house_words() -> Counter[str]:
    """Return how often each house word is used in code, templates, rules and pages, whole or as a part."""
    files = [*(ROOT / "workflow").rglob("*"), *(ROOT / "docs").rglob("*.md")]
    texts = [
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in {".py", ".j2", ".js", ".smk", ".md", ".json"}
    ]
    words = [word for word in HOUSE_WORDS if not word.endswith("_")]
    beginnings = [word for word in HOUSE_WORDS if word.endswith("_")]
    whole = re.compile(f"(?<![a-z])({'|'.join(words)})(?![a-z])", re.IGNORECASE)
    begun = re.compile(f"(?<![A-Za-z])({'|'.join(beginnings)})")
    used: Counter[str] = Counter()
    for text in texts:
        used.update(word.lower() for word in whole.findall(text))
        used.update(begun.findall(text))
    return used


@pytest.mark.slow
def test_house_words_become_fewer() -> None:
    used = count_house_words()
    more = {
        f"{word}: {field}": used[word] - most
        for word, (field, most) in HOUSE_WORDS.items()
        if used[word] > most
    }
    assert not more, "use the field's word for what is new"
    fewer = {
        word: most - used[word] for word, (_, most) in HOUSE_WORDS.items() if used[word] < most
    }
    assert sum(fewer.values()) <= 100, f"lower the numbers by {fewer}"


@pytest.mark.slow
def test_a_class_has_its_name_alone() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "workflow/stratbench").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    several = {
        name: each for name, each in places.items() if len(each) > 1 and name not in NAMED_BY_OTHERS
    }
    assert not several


@pytest.mark.slow
def test_docstrings_and_names_follow_ruff_more_and_more() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format=json", "--select",
         ",".join(LEFT_BY_RUFF), "--config", 'lint.pydocstyle.convention="google"', "workflow/stratbench"],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    left = Counter(finding["code"] for finding in json.loads(done.stdout))
    assert not {code: n for code, n in left.items() if n > LEFT_BY_RUFF[code]}, (
        "say what is public and new"
    )
    fewer = {code: most - left[code] for code, most in LEFT_BY_RUFF.items() if left[code] < most}
    assert sum(fewer.values()) <= 10, f"lower the numbers by {fewer}"


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text without code blocks, tables, headings and lists' marks."""
    prose = re.sub(r"```.*?```|~~~.*?~~~|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    lines = (
        line for line in prose.splitlines() if not re.match(r"\s*(\||#|:::|[A-Z]\w+:$| {4})", line)
    )
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(lines))
    return [
        sentence
        for block in blocks
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(block.split()))
        if sentence
    ]


def count_in_sentences(sentences: list[str], where: str) -> Counter[str]:
    """Return how many sentences are long, or begin with a word that no sentence begins with."""
    return Counter(
        {
            f"sentences of {where} with over 25 words": sum(
                len(s.split()) > MAX_WORDS for s in sentences
            ),
            f"sentences of {where} that begin with Of, What or Who": sum(
                s.split()[0] in ("Of", "What", "Who") for s in sentences
            ),
        }
    )


def is_explanation(node: ast.AST) -> bool:
    """Return whether a function is a rule of the audit, whose docstring is text of the report."""
    return any(
        "rule" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())
    )


def count_in_function(node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> Counter[str]:
    """Return what the style guide asks of a function's docstring, and it has not."""
    first = split_sentences(docstring)[0].split()
    described = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    described = [
        name for name in described if name not in ("self", "cls") and not name.startswith("_")
    ]
    return Counter(
        {
            "docstrings of functions that begin with no verb": first[0].rstrip(",:") in NO_VERBS
            and not any("property" in ast.unparse(d) for d in node.decorator_list),
            "docstrings whose first sentence has over 15 words": len(first) > MAX_FIRST_WORDS,
            "public functions of three or more parameters without Args": not node.name.startswith(
                "_"
            )
            and len(described) >= MIN_DESCRIBED
            and "Args:" not in docstring,
        }
    )


@pytest.mark.slow
def test_docstrings_and_pages_follow_the_style_guide_more_and_more() -> None:
    left: Counter[str] = Counter()
    for path in sorted((ROOT / "workflow/stratbench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            docstring = ast.get_docstring(node)
            if docstring is None or is_explanation(node):
                continue
            left += count_in_sentences(split_sentences(docstring), "docstrings")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                left += count_in_function(node, docstring)
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        if path.name != "modules.md":  # from docstrings
            left += count_in_sentences(split_sentences(path.read_text(encoding="utf-8")), "pages")
    more = {name: left[name] for name, most in LEFT_IN_TEXTS.items() if left[name] > most}
    assert not more, "begin with the verb, describe parameters, divide long sentences"
    fewer = {name: most - left[name] for name, most in LEFT_IN_TEXTS.items() if left[name] < most}
    assert sum(fewer.values()) <= 50, f"lower the numbers by {fewer}"
