"""The lines that end a run: the answers, the audit's tally, the start skew."""

import json

from stratbench.analysis.report import brief

ANSWERS = [
    {"model": "vgg16", "experiment": "main", "headline": "ddp on 4 GPUs.", "confidence": "low"},
    {"model": "gpt", "experiment": "", "headline": "Begin with ddp.", "confidence": "none"},
]


def test_a_finished_study_is_told_in_a_few_lines(tmp_path):
    (tmp_path / "answers.json").write_text(json.dumps({"answers": ANSWERS}))
    (tmp_path / "audit.csv").write_text("rule,severity\na,doubtful\nb,note\nc,note\n")
    (tmp_path / "cells.csv").write_text("strategy,start_skew_ms\nddp,3.0\nfsdp,9.04\nps-sync,\n")
    assert list(brief.answer_lines(tmp_path)) == [
        "vgg16 (main): ddp on 4 GPUs. Confidence: low.",
        "gpt: Begin with ddp. Confidence: none.",
        "Audit: 0 unusable, 1 doubtful, 2 to note.",
        "Start skew of an epoch's workers: median 6.0 ms, largest 9.0 ms in 2 cells.",
    ]
    (tmp_path / "cells.csv").write_text("strategy,start_skew_ms\nsingle,\n")
    assert not any("skew" in line for line in brief.answer_lines(tmp_path))
