"""A stranger's data: a folder, a text and a function; planned, trained, reported, and trained again."""

from __future__ import annotations

import json

import pytest
from own_files import CODE, config_with, write_files
from tiny_study import Workflow, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_ones_own_data_are_planned_trained_and_reported(tmp_path):
    config = config_with(tiny_config())
    work = Workflow(tmp_path, config)
    write_files(tmp_path)

    plan = work.run("plan")
    assert plan.returncode == 0, plan.stdout
    for name in ("stripes", "pictures", "letters"):
        assert f"== {name}: {name}, fp32" in plan.stdout

    done = work.run()
    assert done.returncode == 0, done.stdout
    records = {
        name: json.loads(work.record(name, "single", model, "1gpu").read_text())
        for name, model in (
            ("stripes", "vgg-compact"), ("pictures", "vgg-compact"), ("letters", "gpt-compact"),
        )
    }  # fmt: skip
    found = {n: (r["data"]["train_samples"], r["data"]["test_samples"]) for n, r in records.items()}
    # Of 1720 characters the last tenth is the test text, in pieces of 16 with a token that comes next.
    assert found == {"stripes": (64, 32), "pictures": (22, 2), "letters": (96, 10)}
    assert records["stripes"]["data"]["own"]["files"] == ["my_data.py"]
    assert records["stripes"]["data"]["own"]["call"] == "my_data.stripes"
    assert records["pictures"]["data"]["own"]["kind"] == "images"
    assert records["pictures"]["data"]["buffered_batches"] == 2
    for r in records.values():
        assert r["data"]["own"]["sha256"] == r["settings"]["own_data"]["sha256"]
    assert "pictures" in (tmp_path / "results/tiny/report.html").read_text()

    def trained_again() -> set[str]:
        told = work.run("-n").stdout
        return {name for name in records if f"train tiny/{name}: " in told}

    # A folder that has moved, and a file that was only touched, train nothing again.
    (tmp_path / "pictures").rename(tmp_path / "moved")
    config["datasets"]["pictures"]["images"] = "moved"
    work.write_config(config)
    (tmp_path / "letters.txt").touch()
    assert trained_again() == set()
    # What was changed trains its own cells again, and no other.
    (tmp_path / "moved/cats/0.png").unlink()
    (tmp_path / "my_data.py").write_text(CODE.replace("+= 100", "+= 90"))
    assert trained_again() == {"pictures", "stripes"}
