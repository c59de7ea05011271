"""Reads the paper's tables and claims from workflow/reference/, and makes cells from its tables."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.installation import REFERENCE
from stratbench.strategies import get_option_defaults, get_strategy_class, get_traits

#: Number of parameters of each of the paper's models with 1000 classes.
PARAMETERS = {
    "vgg16": 138_357_544,
    "efficientnet_v2_l": 118_515_272,
    "convnext_large": 197_767_336,
    "resnet50": 25_557_032,
    "densenet121": 7_978_856,
}


def read_published_tables() -> pd.DataFrame:
    """Return a row per value in the paper's tables, with its version, table and cell.

    If the paper prints only that a time is above a limit, the value is NaN and `limit_s` has the limit.
    """
    return pd.read_csv(REFERENCE / "tables.csv")


def read_published_claims() -> pd.DataFrame:
    """Return a row per claim in the paper's text, with its metric and limits.

    The column `in_the_paper` says whether the paper's own tables agree, and is empty without such values.
    """
    return pd.read_csv(REFERENCE / "claims.csv").fillna({"in_the_paper": ""})


def read_explanations() -> pd.DataFrame:
    """Return explanations for contradictions between our records and the paper's claims or tables.

    The columns are `about` (claim or table), `rule` and `explanation`.
    """
    return pd.read_csv(REFERENCE / "explanations.csv", keep_default_na=False)


def read_accuracy_floors() -> dict[str, float]:
    """Return the accuracy that the simplest models reach, as a share by data set."""
    known = pd.read_csv(REFERENCE / "floors.csv")
    return dict(zip(known["dataset"], known["accuracy_percent"] / 100, strict=True))


def make_cells_from_paper(version: str) -> pd.DataFrame:
    """Return the values in one paper version's tables, as rows of cells.csv.

    Values that the paper does not state are absent. Values of one cell in two tables give one row.

    Raises:
        ValueError: Two tables have different values of one cell.
    """
    tables = read_published_tables()
    tables = tables[tables["version"] == version]
    setups = pd.read_csv(REFERENCE / "experiments.csv").set_index(["version", "dataset"])
    rows = []
    for (strategy, model, dataset, gpus), printed in tables.groupby(
        ["strategy", "model", "dataset", "gpus"], sort=False
    ):
        if (printed.groupby("measure")["value"].nunique() > 1).any():
            raise ValueError(
                f"paper {version}: two tables have different values of {strategy}, {model}, {gpus} GPUs"
            )
        setup = setups.loc[(version, dataset)]
        values = printed.groupby("measure")[["value", "limit_s"]].first()
        time_s = values["value"].get("training_time_s")
        accuracy = values["value"].get("accuracy_percent")
        per_epoch = setup["train_samples"] // setup["global_batch"] * setup["global_batch"]
        samples = per_epoch * setup["epochs"]
        # Without a stated number of epochs, one epoch is assumed. Then only ratios of throughputs are right.
        work = per_epoch if pd.isna(samples) else samples
        rows.append(
            {
                "study": f"paper-{version}",
                "experiment": setup["experiment"],
                "strategy": strategy,
                "model": model,
                "dataset": dataset,
                "gpus": gpus,
                "repeat": 0,
                "status": "timeout" if values["limit_s"].notna().any() else "ok",
                "strategy_base": strategy,
                "strategy_kind": get_strategy_class(strategy).kind,
                "train_time_s": time_s,
                "throughput_samples_per_s": work / time_s if time_s else None,
                "task": "classification",
                "score_name": "accuracy",
                "score_unit": "share",
                "score_better": "higher",
                "score_final": accuracy / 100 if accuracy else None,
                "time_limit_s": values["limit_s"].max(),
                "samples_seen": samples,
                "samples_applied": samples,
                "global_batch": setup["global_batch"],
                "epochs": setup["epochs"],
                "precision": setup["precision"],
                "model_parameters": PARAMETERS[model],
                "trainable_parameters": PARAMETERS[model],
                "device_kind": "cuda",
                "device_name": setup["device"],
            }
            | asdict(get_traits(strategy, get_option_defaults(strategy), gpus))
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def mask_cells_in_paper(cells: pd.DataFrame) -> pd.Series:
    """Return for each row whether its cell is also in the published paper, as booleans.

    Such a cell has the strategy, model, data set and number of GPUs of a published cell. Variants, CPU
    processes, cells slowed on purpose and other tasks than classification are excluded.
    """
    place = ["strategy", "model", "dataset", "gpus"]
    published = set(read_published_tables()[place].itertuples(index=False, name=None))
    is_published = [row in published for row in cells[place].itertuples(index=False, name=None)]
    plain = (cells["strategy"] == cells["strategy_base"]) & cells["slowdown"].isna()
    plain &= cells["task"].fillna("classification") == "classification"
    return pd.Series(is_published, index=cells.index) & plain & (cells["device_kind"] == "cuda")
