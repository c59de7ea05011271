"""plan.html: in a real browser its figures are the plan's, at points that it was not given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Browser
from browser_fixtures import browser  # noqa: F401
from test_plan_footprint import describe_gpt

from stratbench.cell.text.words import COLUMNS, format_bytes
from stratbench.extensions.plan import check, public_runs, schedule
from stratbench.extensions.plan.__main__ import main as plan_main
from stratbench.extensions.plan.duration import ProjectedDuration, Span
from stratbench.extensions.plan.footprint.traffic import PARTS
from stratbench.extensions.plan.one_model import one_network
from stratbench.extensions.plan.pages import what_fits
from stratbench.extensions.plan.pages.text import group_columns_by_width, write_plan_html
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class
from stratbench.study.config import config as configuration

pytestmark = pytest.mark.timeout(600)
#: How near the page's figures have to be.
WITHIN = 0.01
IMAGES = {
    "dataset": "pictures",
    "strategies": ["single", "ddp", "ddp-powersgd", "zero1", "fsdp", "diloco-8", "post-local",
                   "ps-sync", "ps-async-modified"],
    "models": ["vgg-compact"],
    "gpus": [1, 2, 8],
    "epochs": 3,
    "global_batch": 64,
    "lr": 0.1,
    "precision": "bf16",
}  # fmt: skip
RESIDUAL = IMAGES | {"models": ["resnet-compact"], "gpus": [2, 8]}
TEXT = IMAGES | {
    "dataset": "words",
    "strategies": ["ddp", "tensor", "pipeline", "fsdp", "fsdp-policy"],
    "models": ["small"],
    "gpus": [2],
    "optimizer": "adamw",
    "data_placement": "host",
}


#: The page's states and the plan's verdicts.
WORDS = {"fit": "fits", "tight": "tight", "no": "does not fit"}


def config_of(
    results: Path, gpu: str = "A10G", margin: float = 0.1, only: str = "", **changes: Any
):
    variants = {
        "ddp-powersgd": {
            "strategy": "ddp",
            "compress": "powersgd",
            "powersgd_rank": 4,
            "powersgd_start_step": 10,
        },
        "diloco-8": {"strategy": "diloco", "inner_steps": 8},
        "post-local": {"strategy": "local-sgd", "start": 24},
        "fsdp-policy": {"strategy": "fsdp", "mixed_precision": "policy"},
    }
    blocks = {
        "images": IMAGES | changes,
        "residual": RESIDUAL | {"strategies": ["ddp", "zero1", "fsdp"]} | changes,
        "checkpointed": RESIDUAL
        | {"strategies": ["ddp", "fsdp"], "activation_checkpointing": True}
        | changes,
        "text": TEXT | changes,
    }
    return {
        "study": "s",
        "results": str(results),
        "cluster": {"gpus_per_node": 4, "gpu": gpu, "memory_margin": margin},
        "datasets": {
            "pictures": {"source": "synthetic", "train_samples": 600_000, "size": 64},
            "words": {"source": "markov-text", "train_samples": 600_000},
        },
        "models": {"small": describe_gpt(2, 128)},
        "studies": {
            "s": {
                "variants": variants,
                "experiments": {only: blocks[only]} if only else blocks,
            }
        },
    }


def planned(results: Path, **changes: Any) -> schedule.Plan:
    config, study = configuration.load_config(config_of(results, **changes))
    return schedule.make_plan(config, check.check_study(config, study), {})


@pytest.fixture(scope="module", autouse=True)
def short_public_runs() -> Iterator[None]:
    """Have public runs say something of steps that are as short as a compact network's."""
    known = public_runs.get_public_time_ratios()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public_runs, "get_public_time_ratios", lambda: known._replace(least_s=0.0))
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_plan_html(planned(folder), folder / "plan.html")
    return folder


@pytest.fixture
def page(results: Path, browser: Browser) -> Browser:  # noqa: F811
    browser.open((results / "plan.html").as_uri())
    return browser


def choice_of(page: Browser, c: schedule.PlannedCell, gpu: str) -> dict[str, Any]:
    s = c.subject.settings
    label = next(
        name for name in page.run("D.networks.map((n) => n.name)") if name.startswith(s.model)
    )
    return {
        "network": label,
        "device": gpu,
        "strategy": c.cell.strategy,
        "workers": c.cell.gpus,
        "batch": s.global_batch,
        "precision": s.precision,
        "checkpointing": int(s.activation_checkpointing),
    }


def figures(page: Browser, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return page.run(f"{json.dumps(choices)}.map((s) => figures(s))")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "batch"), [("A10G", 64), ("A10G", 4096), ("H100 SXM", 1056), ("T4", 248_000)]
)
def test_the_pages_figures_are_the_plans_at_batches_and_gpus_that_it_was_not_given(
    page: Browser, results: Path, gpu: str, batch: int
):
    plan = planned(results, gpu=gpu, global_batch=batch)
    known = [c for c in plan.cells if c.footprint is not None]
    assert len({c.cell.strategy for c in known}) > 8
    narrowed = any(
        c.fit.device_rate_span and "public runs" in c.fit.device_rate_span.source for c in known
    )
    assert narrowed == (gpu == "H100 SXM")
    for c, told in zip(
        known, figures(page, [choice_of(page, c, plan.device) for c in known]), strict=True
    ):
        fit, where = c.fit, f"{c.cell} at {batch} on {gpu}"
        assert told["needed"] == pytest.approx(fit.needed_bytes, rel=WITHIN), where
        assert WORDS[told["state"]] == fit.memory_verdict, where
        assert told["mostSamples"] * c.subject.steps_per_batch == fit.largest_batch, where
        assert told["sent"] == pytest.approx(c.needs.wire_bytes, rel=WITHIN), where
        if fit.device_rate_span is None:
            assert told["span"] is None, where
        else:
            span = (fit.device_rate_span.low_s, fit.device_rate_span.high_s)
            assert told["span"] == pytest.approx(span, rel=WITHIN), where
            assert told["usual"] == pytest.approx(fit.usual_s, rel=WITHIN), where
        assert sum(told["parts"].values()) == pytest.approx(fit.needed_bytes, rel=WITHIN), where
        if told["phase"] == fit.peak.phase:
            weights = sum(fit.peak.parts_bytes[part] for part in ("parameters", "buffers"))
            assert told["parts"]["weights"] == pytest.approx(weights, rel=WITHIN), where


@pytest.mark.slow
def test_between_two_counts_of_workers_the_pages_figures_are_the_plans(
    page: Browser, results: Path
):
    """The page was given 1, 2 and 8 workers; those of 4 are its own."""
    names = ["ddp", "ddp-powersgd", "zero1", "fsdp", "diloco-8", "ps-sync"]
    given = {"gpus": [4], "strategies": names}
    plan = planned(results, only="images", **given)
    told = figures(page, [choice_of(page, c, plan.device) for c in plan.cells])
    interpolated = set()
    for c, shown in zip(plan.cells, told, strict=True):
        if "needed" not in shown:  # what it does not know, it says
            assert "this plan has no" in shown["reason"], c.cell
            continue
        interpolated.add(c.cell.strategy)
        span = (c.fit.device_rate_span.low_s, c.fit.device_rate_span.high_s)
        assert shown["needed"] == pytest.approx(c.fit.needed_bytes, rel=WITHIN), c.cell
        assert shown["sent"] == pytest.approx(c.needs.wire_bytes, rel=WITHIN), c.cell
        assert shown["span"] == pytest.approx(span, rel=WITHIN), c.cell
    assert interpolated >= {"ddp", "zero1", "fsdp", "diloco-8"}
    assert "ps-sync" not in interpolated


@pytest.mark.slow
def test_a_network_alone_is_planned_without_a_study(tmp_path, monkeypatch, capsys):
    given = yaml.safe_load(one_network.TEMPLATE.read_text(encoding="utf-8"))
    given["numbers"] = {"replicas": {"strategies": ["single", "ddp"], "gpus": [1, 2]}}
    given["each"] = {"bf16": given["each"]["bf16"]}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    monkeypatch.setattr(one_network, "TEMPLATE", tmp_path / "small.yaml")
    monkeypatch.chdir(tmp_path)
    config = ["--config", '{"cluster": {"gpu": "A10G"}}']
    assert plan_main([*config, "--model", "vgg-compact", "--dataset", "digits"]) == 0
    said = capsys.readouterr().out
    assert "vgg-compact on A10G, digits, sgd, bf16, global batch 256" in said
    assert "per worker that it needs, at 1, 2 workers (! does not fit, ? tight)" in said
    assert (tmp_path / "results/model-vgg-compact/plan.html").is_file()
    assert plan_main([*config, "--model", "vgg-compct"]) == 1
    assert "vgg-compct: is not a model." in capsys.readouterr().err


@pytest.mark.parametrize("dataset", ["tiny-text", "digits"])
def test_a_network_of_ones_own_alone_needs_neither_arguments_nor_an_experiment(dataset):
    """A text is learnt by AdamW, as the built-in networks that read texts are."""
    text = {"source": "markov-text", "train_samples": 1024, "test_samples": 8, "vocabulary": 9,
            "sequence": 8}  # fmt: skip
    config = {
        "models": {"mine": {"call": "my_net.Net"}},
        "datasets": {"tiny-text": text},
        "code": [str(Path(__file__).parent)],
    }
    _, study, _ = one_network.make_model_study(config, "mine", dataset)
    optimizers = {study.settings(cell).optimizer for cell in study.cells}
    assert optimizers == {"adamw" if dataset == "tiny-text" else "sgd"}


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--model", "resnet5", "--model resnet5: is not a model. Did you mean 'resnet50'?"),
        ("--dataset", "cifar", "--dataset cifar: is not a data set. Did you mean 'cifar10'?"),
    ],
)
def test_what_a_network_alone_is_misnamed_is_told_by_the_option(option, value, told, capsys):
    given = {"--config": "{}", "--model": "resnet50"} | {option: value}
    assert plan_main([text for pair in given.items() for text in pair]) == 1
    said = capsys.readouterr().err
    assert f"error: {told}" in said
    assert max(map(len, said.splitlines())) <= COLUMNS


@pytest.mark.slow
def test_the_same_choice_is_shown_on_a_card_of_each_usual_size(page: Browser):
    names = page.run("[...document.querySelectorAll('#cards button b')].map((b) => b.textContent)")
    assert names == list(what_fits.USUAL_CARDS)
    page.run("document.querySelectorAll('#cards button')[3].click()")
    assert page.run("S.device") == names[3]
    assert page.complaints == []


@pytest.mark.slow
def test_on_more_workers_than_the_study_has_its_figures_are_those_of_a_plan_that_has_them(
    page: Browser, results: Path
):
    """The page has 2 and 8; what is a line in one over the workers goes on."""
    plan = planned(results, only="residual", global_batch=4096, gpus=[32])
    for c, told in zip(
        plan.cells,
        figures(page, [choice_of(page, c, plan.device) for c in plan.cells]),
        strict=True,
    ):
        assert told["needed"] == pytest.approx(c.fit.needed_bytes, rel=WITHIN), c.cell
        # FSDP pads each tensor to a multiple of the workers: of a small network that is some percent.
        room = 0.1 if c.cell.strategy == "fsdp" else WITHIN
        assert told["sent"] == pytest.approx(c.needs.wire_bytes, rel=room), c.cell
        span = (c.fit.device_rate_span.low_s, c.fit.device_rate_span.high_s)
        assert told["span"] == pytest.approx(span, rel=room), c.cell


@pytest.mark.slow
def test_the_fan_says_what_is_measured_what_projected_and_what_theory(
    results: Path,
    tmp_path: Path,
    browser: Browser,  # noqa: F811
):
    config, study = configuration.load_config(config_of(results, only="images", strategies=["ddp"]))
    two = next(c for c in study.cells if c.gpus == 2)
    projected = {
        replace(two, gpus=n): ProjectedDuration(
            Span(90.0 / n, 110.0 / n, "projected, 80 %: by counts"), 64
        )
        for n in (8, 16)
    }
    checked = check.check_study(config, study)
    plan = schedule.make_plan(config, checked, {}, projected_durations=projected)
    write_plan_html(plan, tmp_path / "plan.html")
    browser.open((tmp_path / "plan.html").as_uri())
    assert browser.run("figures({...S, workers: 16}).span") == [90 / 16, 110 / 16]
    told = browser.run("document.getElementById('oversub').textContent")
    assert "Projected to 8 and 16 from records of this study" in told
    assert "grey is theory, by the card’s datasheet" in told
    assert browser.run("document.querySelectorAll('#fan .range.projected').length") == 2
    for width in (420, 1280):  # labels are as large on a phone, and two times at least are inside
        browser.sized(width, 900)
        assert browser.run("document.querySelectorAll('#fan .ylabels span').length") >= 2
        outside = (
            "(() => { const box = document.getElementById('over').getBoundingClientRect();"
            " return [...document.querySelectorAll('#fan span')].map((s) => s.getBoundingClientRect())"
            ".filter((s) => s.height < 15 || s.left < box.left || s.right > box.right).length; })()"
        )
        assert browser.run(outside) == 0
    browser.run("choose({ batch: 128 })")  # of which there is no record
    assert "Grey is theory" in browser.run("document.getElementById('oversub').textContent")
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_the_largest_batch_fits_in_the_plan_and_the_next_does_not(
    results: Path,
    browser: Browser,  # noqa: F811
    margin: float,
):
    """At the border of out of memory: the page's largest batch of a strategy, and one more a worker."""
    write_plan_html(planned(results, gpu="V100 16GB", margin=margin), results / "border.html")
    browser.open((results / "border.html").as_uri())
    at = {"gpu": "V100 16GB", "margin": margin, "only": "images"}

    def on_eight(plan: schedule.Plan) -> dict[str, schedule.PlannedCell]:
        return {c.cell.strategy: c for c in plan.cells if c.cell.gpus == 8}

    plan = planned(results, **at)
    for strategy in ("ddp", "fsdp", "ps-async-modified"):
        c = on_eight(plan)[strategy]
        choice = choice_of(browser, c, plan.device)
        [told] = figures(browser, [choice])
        each = c.subject.strategy.mesh(8).replicas * c.subject.steps_per_batch
        most = told["most"]
        assert most >= 8 * each
        assert most % each == 0
        for batch, fits in ((most, True), (most + each, False)):
            # The network is checked with the first of its cells, which is the same as before.
            both = {"strategies": ["single", strategy], "global_batch": batch}
            there = on_eight(planned(results, **at, **both))[strategy]
            assert there.fit.memory_verdict == ("fits" if fits else "tight"), (strategy, batch)
            [shown] = figures(browser, [choice | {"batch": batch}])
            assert WORDS[shown["state"]] == there.fit.memory_verdict, (strategy, batch)


@pytest.mark.slow
def test_amounts_of_memory_are_written_as_in_texts(page: Browser):
    amounts = [0, 700, 3 << 19, 1023 << 20, 1.234 * 2**30, 9.996 * 2**30, 79.5 * 2**30, 1e13]
    assert page.run(f"{amounts}.map(bytesText)") == [format_bytes(n) for n in amounts]


@pytest.mark.slow
def test_the_page_keeps_its_state_in_its_address_and_mends_one_that_is_none(page: Browser):
    address = page.run("location.href.split('#')[0]")
    page.run("choose({ strategy: 'fsdp', workers: 2, batch: 96 })")
    found = page.run("location.hash")
    page.open(address + found)
    assert page.run("[S.strategy, S.workers, S.batch]") == ["fsdp", 2, 96]
    assert page.run("document.querySelector('#table [aria-pressed=true]').ariaLabel").startswith(
        "fsdp on 2. Fits"
    )
    page.open(address + "#network=<b>no</b>&workers=x&batch=-3&device=7&strategy=%")
    assert page.run("[S.network, S.workers, S.batch, S.device]") == [
        page.run("D.networks[0].name"), 8, 64, "A10G",
    ]  # fmt: skip
    assert page.complaints == []


@pytest.mark.slow
def test_each_control_changes_what_it_says_and_the_keyboard_does_it_too(page: Browser):
    def set_to(name: str, value: Any) -> None:
        page.run(
            f"form.{name}.value = {json.dumps(value)};"
            f"form.{name}.dispatchEvent(new Event('input', {{ bubbles: true }}))"
        )

    networks = page.run("D.networks.map((n) => n.name)")
    assert len(networks) == 3
    set_to("network", next(n for n in networks if n.startswith("resnet")))
    set_to("batch", 8192)  # of so many activations are most
    needed = "figures(S).needed"
    before = page.run(needed)
    page.run("form.checkpointing.click()")
    assert page.run("S.checkpointing") == 1
    assert page.run(needed) < before
    set_to("batch", 640)
    assert page.run("form.slider.getAttribute('aria-valuetext')") == "640"
    assert page.run("document.getElementById('hint').textContent").endswith(
        "80 samples per worker."
    )
    page.run("form.slider.focus()")
    page.press("ArrowRight")
    assert page.run("S.batch") == 768
    page.run("form.querySelector('input[name=workers]:checked').focus()")
    page.press("ArrowLeft")
    assert page.run("S.workers") == 2
    assert page.run("document.activeElement.name + document.activeElement.value") == "workers2"
    page.run(
        "document.querySelector(`#table button[aria-pressed=false][aria-label*=' on 2.']`).focus()"
    )
    page.press("Enter")
    assert page.run("document.activeElement.ariaPressed") == "true"
    labelled = (
        "[...document.querySelectorAll('input, select, button')].filter((e) => e.offsetParent && !("
        "e.labels?.length || e.ariaLabel || e.textContent.trim())).length"
    )
    assert page.run(labelled) == 0
    set_to("batch", 97)
    assert "cannot be divided" in page.run("document.getElementById('verdict').textContent")
    for name in networks:
        set_to("network", name)
        told = page.run("document.getElementById('kept').textContent")
        both = page.run("!form.checkpointing.disabled")
        assert told == ("" if both else f"In {page.run('S.precision')} no cell of {name} has it.")
    assert page.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_runs_over_the_edge_of_the_page(page: Browser, width: int):
    page.sized(width, 900)
    page.run("show()")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.sized(1280, 1000)


def test_columns_that_do_not_fit_a_terminal_stand_in_a_further_table():
    assert group_columns_by_width([20, 30, 30]) == [[1, 2]]
    assert group_columns_by_width([20, 30, 30, 30, 9]) == [[1, 2], [3, 4]]
    assert group_columns_by_width([20, 200, 9]) == [[1], [2]]  # what is wider than all stands alone
    assert group_columns_by_width([20]) == [[]]


def test_the_bars_groups_are_all_parts_of_the_memory_but_the_data():
    grouped = [part for members in what_fits.GROUPS.values() for part in members]
    assert sorted([*grouped, "data"]) == sorted(PARTS)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_steps_in_which_workers_exchange_follow_from_what_the_page_is_told(name: str):
    cls = get_strategy_class(name)
    strategy = cls(cls.Options(**get_option_defaults(name)))
    start, period = what_fits.find_num_first_steps_and_period(strategy)
    for steps in (1, 3, 7, 24, 25, 100, 1001, 5000):
        apart = max(0, steps - start)
        assert strategy.count_exchanges(steps) == steps - apart + -(-apart // period), steps
