"""The lines that end a run: the answers, the audit's tally, the start skew."""

import json
from dataclasses import asdict

from stratbench.analysis.decision.short import ShortAnswer
from stratbench.analysis.report import brief

FIRST = ShortAnswer(
    "ddp", 4, "Fastest, in one run each.", "one run", "214 s", reason="one run each: may be chance"
)
SECOND = ShortAnswer(None, None, "Every cell failed.", "none", reason="2 of 2 failed")
ANSWERS = [
    {"model": "vgg16", "experiment": "main", "short": asdict(FIRST), "confidence": "low"},
    {"model": "gpt", "experiment": "texts", "short": asdict(SECOND), "confidence": "none"},
]
LEAD = "Two questions, no sure answer yet."


def test_a_finished_study_is_told_in_a_few_lines(tmp_path):
    (tmp_path / "answers.json").write_text(json.dumps({"lead": LEAD, "answers": ANSWERS}))
    (tmp_path / "audit.csv").write_text("rule,severity\na,warning\nb,note\nc,note\n")
    (tmp_path / "cells.csv").write_text("strategy,start_skew_ms\nddp,3.0\nfsdp,9.04\nps-sync,\n")
    assert list(brief.iter_study_summary_lines(tmp_path)) == [
        LEAD,
        "vgg16 (main): ddp × 4, 214 s. Fastest, in one run each. "
        "Confidence: low (one run each: may be chance).",
        "gpt (texts): Every cell failed. Confidence: none (2 of 2 failed).",
        "Audit findings: 0 unusable, 1 warning, 2 notes.",
        "Start skew between the workers of an epoch: median 6.0 ms, maximum 9.0 ms over 2 cells.",
    ]
    (tmp_path / "cells.csv").write_text("strategy,start_skew_ms\nsingle,\n")
    assert not any("skew" in line for line in brief.iter_study_summary_lines(tmp_path))
