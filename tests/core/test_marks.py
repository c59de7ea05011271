"""The marks of strategies: contrasts, colour-blind readers, members that differ in black and white."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from stratbench.analysis.figures import marks
from stratbench.analysis.figures.marks import DARK_PAPER, FAMILIES, LIGHT_PAPER
from stratbench.cell.extensions import load_extensions
from stratbench.strategies import REGISTRY, get_strategy_class

THEMES = {"light": LIGHT_PAPER, "dark": DARK_PAPER}
#: How eyes without one kind of cones see linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}  # fmt: skip


def linear(colour: str) -> np.ndarray:
    """The linear RGB of an sRGB colour (IEC 61966-2-1)."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson's OKLab (2020) of linear RGB: equal distances look alike; 0.02 is just visible."""
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(rgb, 0, None))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_colours_stand_out_from_the_paper(family, theme):
    full, quiet = getattr(FAMILIES[family], f"full_and_quiet_{theme}_colours")
    assert contrast(full, THEMES[theme]) >= 4.5
    assert contrast(quiet, THEMES[theme]) >= 3.0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eyes", EYES)
def test_families_are_told_apart_by_their_hues_whoever_looks(eyes, theme):
    seen = {
        f: oklab(EYES[eyes] @ linear(getattr(hue, f"full_and_quiet_{theme}_colours")[0]))
        for f, hue in FAMILIES.items()
    }
    nearest = min(float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2))
    assert nearest >= (0.12 if eyes == "all cones" else 0.08)


def test_the_members_of_a_family_differ_in_black_and_white():
    """And families by their shapes: no colour is needed to know a strategy."""
    looks = marks.assign_marks_by_strategy((name, name) for name in REGISTRY)
    assert len(
        {(m.family_shape, m.mark_filling, m.line_dash_pattern) for m in looks.values()}
    ) == len(looks)
    assert len({hue.shape for hue in FAMILIES.values()}) == len(FAMILIES)


def test_no_dash_is_needed_on_the_page_of_all_cells():
    """Nor for a ninth member of a family, as the paper's study has one."""
    looks = marks.assign_marks_by_strategy(
        [*((n, n) for n in REGISTRY), ("async-scaled", "ps-async")]
    )
    assert len({m.shape_and_filling for m in looks.values()}) == len(looks)
    assert {m.shape_and_filling.split()[1] for m in looks.values()} <= set(marks.FILLS)
    assert len(set(marks.FILLS.values())) == len(marks.FILLS)


def test_every_strategys_family_has_a_hue():
    assert {get_strategy_class(name).family for name in REGISTRY} <= set(FAMILIES)


def test_a_variant_is_a_further_member_of_its_family():
    looks = marks.assign_marks_by_strategy(
        [("ddp-slow", "ddp"), ("ddp", "ddp"), ("theirs", "gone")]
    )
    assert looks["ddp-slow"].family == looks["ddp"].family
    assert looks["ddp-slow"] != looks["ddp"]
    assert looks["theirs"].family == "other"


@pytest.mark.parametrize("shape", sorted({hue.shape for hue in FAMILIES.values()}))
def test_a_shape_is_drawn_around_its_place(shape):
    d = marks.build_svg_outline_path(shape, 50.0, 20.0, 5.0)
    assert d.startswith("M")
    assert d.endswith("Z")
    if shape != "circle":
        points = np.array([[float(v) for v in p.split(",")] for p in d[1:-1].split("L")])
        assert np.abs(points - [50.0, 20.0]).max() <= 7
        assert points.mean(axis=0) == pytest.approx([50.0, 20.0], abs=1.5)


@pytest.mark.parametrize("extension", [n for n, e in load_extensions().items() if e.strategies])
def test_a_deleted_extension_leaves_the_marks_of_all_others(monkeypatch, extension):
    before = marks.assign_marks_by_strategy((name, name) for name in REGISTRY)
    gone = load_extensions()[extension].strategies
    left = {name: cls for name, cls in REGISTRY.items() if name not in gone}
    monkeypatch.setattr(marks, "REGISTRY", left)
    monkeypatch.setattr(
        marks,
        "number_strategies_in_each_family",
        marks.number_strategies_in_each_family.__wrapped__,
    )
    after = marks.assign_marks_by_strategy((name, name) for name in left)
    assert after == {name: before[name] for name in left}
