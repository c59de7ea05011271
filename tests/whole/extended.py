"""Uses what docs/extending.md adds: a function for each section, run on a package with its changes.

`python extended.py SECTIONS`: SECTIONS is JSON, of each section the folder of its changed `workflow`.
What all need is imported once. Each section is then used in a process of its own, forked from this
one, which imports the changed package. Prints JSON: of each section what went wrong, or null.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

# What is imported stays: nothing looks for garbage in it, here or in a forked process.
gc.disable()
try:
    import fastjsonschema  # noqa: F401
    import jsonschema  # noqa: F401
    import matplotlib as mpl
    import matplotlib.backends.backend_pdf
    import matplotlib.pyplot
    import numpy as np
    import pandas as pd
    import scipy.stats  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import torch.distributed.fsdp

    with contextlib.suppress(RuntimeError):  # the package knows what to do where it does not load
        import torchvision  # noqa: F401
finally:
    gc.freeze()
    gc.enable()

mpl.use("agg")
CPU = torch.device("cpu")
#: Where the virtual clock is, which no package has.
STATISTICS = Path(__file__).parents[2] / "benchmarks" / "statistics"


def load_study(folder: Path, **changes: Any) -> Any:
    """config and study of one experiment on digits; `changes` replace keys of the experiment."""
    from stratbench.study.config.config import load_config

    experiment = {
        "dataset": "digits", "strategies": ["single"], "models": ["vgg-compact"], "gpus": [1],
        "epochs": 1, "global_batch": 16, "lr": 0.02,
    }  # fmt: skip
    variants = changes.pop("variants", {})
    study = {"variants": variants, "experiments": {"first": experiment | changes}}
    raw = {"study": "s", "studies": {"s": study}, "results": str(folder)}
    return load_config(raw)


def trained(
    folder: Path, name: str, model: str = "vgg-compact", dataset: str = "digits", **changes: Any
) -> Any:
    """The strategy `name` after the training loop has trained and evaluated, and the loop's result."""
    from stratbench.cell.run_folder import RunFolder
    from stratbench.strategies import get_strategy_class
    from stratbench.strategies.base import Worker
    from stratbench.telemetry.clock import Phases
    from stratbench.telemetry.memory import MemoryMeter
    from stratbench.telemetry.timeline import PhaseLog
    from stratbench.train import loop
    from stratbench.workload.data.device_data import DeviceData
    from stratbench.workload.data.prepare import prepare_data_set
    from stratbench.workload.network import models

    _, study = load_study(folder, strategies=[name], models=[model], dataset=dataset, **changes)
    s = study.settings(study.cells[0])
    meta = prepare_data_set(dataset, folder / "data", root=folder)
    shape = models.compute_input_shape(model, tuple(meta["shape"]))
    data = DeviceData.load_prepared_data_set(folder / "data", CPU, shape, torch.float32)
    net = models.build_model_for_training(model, meta["classes"], shape, s.seed, CPU, torch.float32)
    run_folder = RunFolder(folder)
    worker = Worker(s, 0, 1, 1, CPU, run_folder, models.list_shard_groups(model, net))
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    cls = get_strategy_class(name)
    strategy = cls(cls.Options(**s.options))
    strategy.setup(net, worker)
    log = PhaseLog(run_folder.get_phase_log_path(0), 0, 0.0)
    phases, progress = Phases("cpu", log), loop.EpochProgress(run_folder)
    return strategy, loop.train(strategy, data, worker, phases, log, MemoryMeter(CPU), progress)


def footprint_of(folder: Path, **changes: Any) -> Any:
    """The plan's prediction of the first cell of a study."""
    from stratbench.extensions.plan.footprint.footprint import make_footprint
    from stratbench.extensions.plan.needs import make_cell_to_plan

    config, study = load_study(folder, **changes)
    return make_footprint(make_cell_to_plan(config, study, study.cells[0]).request)


def analysed(folder: Path, change: Any = None) -> Path:
    """The folder of a constructed study of two strategies, with its tables made."""
    import fixture_records as fixture

    from stratbench.analysis.records import collect
    from stratbench.analysis.tables import tables
    from stratbench.cell import record
    from stratbench.extensions.audit import audit

    cells = fixture.expand(("single", "ddp"), ("vgg16",), (1, 2))
    study = fixture.write_study(folder, cells, change=change)
    for cell in cells:
        record.read_record(cell.record_path(folder))  # valid by the schema
    table = {name: study / f"{name}.csv" for name in ("cells", "epochs", "audit", "summary")}
    collect.collect_records(cells, study, table["cells"], table["epochs"])
    audit.main(["--cells", str(table["cells"]), "--out", str(table["audit"])])
    tables.main(
        ["--cells", str(table["cells"]), "--audit", str(table["audit"]), "--summary-out",
         str(table["summary"]), "--out-dir", str(study / "tables")]
    )  # fmt: skip
    return study


# ---------------------------------------------------------------- the sections


def a_strategy(folder: Path) -> None:
    names = ["ddp", "pairs", "pairs-32"]
    variants = {"pairs-32": {"strategy": "pairs", "period": 32}}
    _, study = load_study(folder, strategies=names, variants=variants, gpus=[2])
    assert [study.settings(cell).options.get("period") for cell in study.cells] == [None, 1, 32]
    planned = footprint_of(folder, strategies=["pairs"], gpus=[2])
    assert planned.compute_training_peak(8).parts_bytes["parameters"] > 0
    strategy, result = trained(folder, "pairs")
    assert result.status == "ok"
    assert result.progress.epoch_results[-1]["score"] > 0.3
    assert strategy.report()["evaluated_on"] == "the workers' mean weights and BatchNorm statistics"


def a_policy(folder: Path) -> None:
    from stratbench.extensions.servers.policies.policies import make_policy
    from stratbench.extensions.servers.policies.policy import Hyper
    from stratbench.extensions.servers.ps.tickets import TicketPlan
    from stratbench.strategies import get_strategy_class, get_traits
    from virtual_clock import Timing, simulate

    _, study = load_study(folder, strategies=["ps-clipped"], gpus=[2])
    assert study.settings(study.cells[0]).options["clip"] == 1.0
    assert get_strategy_class("ps-clipped").kind == "server"
    assert not get_traits("ps-clipped", {}, 1).is_synchronous_on_one_worker
    hyper = Hyper(lr=0.1, workers=2)
    policy = make_policy("ps-clipped", torch.zeros(4), hyper, {"clip": 2.0})
    gradient = lambda ticket, part, weights: torch.full_like(weights, 50.0)  # noqa: E731
    trace = simulate([policy], TicketPlan(1, 5, 2), gradient, Timing(1.0, slowdown=(1.0, 3.0)))
    assert sum(trace.pushes) == 10
    assert torch.allclose(policy.weights, torch.full((4,), -0.1 * 10 * 2.0 / 2))


def a_model(folder: Path) -> None:
    from stratbench.workload.network import models

    net = models.build_model("plain", 1000, (3, 224, 224))
    assert sum(p.numel() for p in net.parameters()) == models.MODELS["plain"].parameters
    assert len(models.list_shard_groups("plain", net)) == 4
    planned = footprint_of(folder, models=["plain"], strategies=["fsdp"], gpus=[2])
    assert [kind for kind, _ in planned.collectives].count("reduce_scatter") == 5
    _, result = trained(folder, "fsdp", "plain")
    assert result.status == "ok"


def a_data_set(folder: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 96), ("test", 24)):
        labels = np.arange(n) % 3
        images = rng.integers(0, 60, (n, 1, 16, 16)) + 90 * labels[:, None, None, None]
        arrays |= {f"{split}_images": images.astype(np.uint8), f"{split}_labels": labels}
    np.savez(folder / "shapes.npz", **arrays)
    _, result = trained(folder, "ddp", dataset="shapes")
    assert result.status == "ok"
    assert result.progress.epoch_results[-1]["score"] > 0.5


def a_setting(folder: Path) -> None:
    from stratbench.cell import record
    from stratbench.study.config.messages import ConfigError
    from stratbench.workload.network import models

    def refusal(**change: Any) -> str:
        try:
            return str(load_study(folder, **change))
        except ConfigError as refused:
            return str(refused)

    assert "clip_value = -1: must be greater than 0. Largest size" in refusal(clip_value=-1)
    assert "clip_value = 'much': must be a number or null" in refusal(clip_value="much")
    assert "gradient as it was pushed" in refusal(clip_value=1, strategies=["ps-sync"])
    assert "clip_value" in record.load_schema()["properties"]["settings"]["required"]
    assert footprint_of(folder, clip_value=0.1) == footprint_of(folder)
    strategy, result = trained(folder, "fsdp", clip_value=1e-6)
    assert result.status == "ok"
    settings = strategy.worker.settings
    assert settings.clip_value == 1e-6
    first = models.build_model_for_training(
        "vgg-compact", 10, (1, 8, 8), settings.seed, CPU, torch.float32
    )
    last = (getattr(p, "full_tensor", lambda p=p: p)() for p in strategy.model.parameters())
    moved = [(p - q).abs().max() for p, q in zip(first.parameters(), last, strict=True)]
    # An epoch's steps, each of which may move ten times as far with momentum.
    assert 0 < max(moved) < 0.02 * 1e-6 * 10 * (1437 // 16)


def a_metric(folder: Path) -> None:
    _, result = trained(folder, "ddp")
    entry = result.progress.epoch_results[-1]
    assert entry["train_loss_std"] > 0

    def change(cell: Any, record: Any) -> Any:
        for each in record["score"]["per_epoch"]:
            each["train_loss_std"] = entry["train_loss_std"]
        return record

    study = analysed(folder / "study", change)
    cells = pd.read_csv(study / "cells.csv")
    assert cells["train_loss_std"].eq(entry["train_loss_std"]).all()
    table = next((study / "tables").rglob("loss_spread.md")).read_text()
    assert f"{entry['train_loss_std']:.3f}" in table
    assert "over the steps of the last epoch" in table


def an_audit_rule(folder: Path) -> None:
    def change(cell: Any, record: Any) -> Any:
        if cell.strategy == "ddp" and cell.gpus == 2:
            record["score"]["final"] = record["score"]["per_epoch"][-1]["score"] = 0.2
        return record

    for planted, expected in ((None, []), (change, ["ddp"])):
        study = analysed(folder / str(len(expected)), planted)
        found = pd.read_csv(study / "audit.csv")
        assert list(found[found["rule"] == "accuracy-falls"]["strategy"]) == expected


def a_figure(folder: Path) -> None:
    from stratbench.analysis.figures import plots
    from stratbench.analysis.figures.sheet import RC

    study = analysed(folder)
    tables = [study / f"{name}.csv" for name in ("cells", "epochs", "summary")]
    data = plots.read_figure_data(*tables, None, study)[0]
    assert plots.has_data("efficiency", data)
    with mpl.rc_context(RC):
        plots.save_figure(plots.draw_figure("efficiency", data).figure, folder / "efficiency")
    assert (folder / "efficiency.svg").stat().st_size > 2_000


# ---------------------------------------------------------------- a process for each


def use(section: str, workflow: str, report: int) -> None:
    """In a forked process: use the section's package, and write what went wrong to a pipe."""
    sys.path[:0] = [workflow, str(STATISTICS), str(Path(__file__).parents[1] / "core")]
    printed = io.StringIO()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            globals()[section](Path(folder))
        text = ""
    except BaseException:
        text = printed.getvalue() + traceback.format_exc()
    with open(report, "w", encoding="utf-8") as pipe:
        pipe.write(text)
    os._exit(0)


def main(sections: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for section, workflow in json.loads(sections).items():
        mine, its = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(mine)
            use(section, workflow, its)
        os.close(its)
        with open(mine, encoding="utf-8") as pipe:
            found[section] = pipe.read() or None
        os.waitpid(pid, 0)
    print(json.dumps(found), flush=True)
    os._exit(0)  # without taking all that was imported apart


if __name__ == "__main__":
    main(sys.argv[1])
