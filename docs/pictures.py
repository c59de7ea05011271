"""Make the pictures of a study's report: `python docs/pictures.py results/demo/report.html`.

Needs chromium. Writes docs/report.png, the first screen, and docs/tutorials/report.png, the same with
two answers and a number at each part. docs/tutorials/report.md explains these numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
#: The numbered parts: selectors, of which the first element is meant.
PARTS = (
    ".lead",
    ".measured",
    'nav a[href="#audit"]',
    ".choice .question",
    ".choice .chosen",
    ".choice .amount",
    ".choice div.scale",
    ".choice .fact:nth-of-type(5)",
    ".choice .fact:nth-of-type(6)",
    ".choice .fact:nth-of-type(7)",
    ".choice details summary",
    ".key",
)
WIDTH = 1280
MAX_BYTES = 200_000
BADGES = """
<style>
.choices .choice:nth-child(n + 4) { display: none; }
.badge { position: absolute; width: 22px; height: 22px; border-radius: 11px; background: #b3261e;
  color: #fff; font: bold 13px/22px sans-serif; text-align: center; }
</style>
<script>
addEventListener("load", () => PARTS.forEach((selector, index) => {
  const box = document.querySelector(selector).getBoundingClientRect();
  const badge = document.createElement("span");
  badge.className = "badge";
  badge.textContent = index + 1;
  badge.style.left = `${Math.max(box.left - 25, 4)}px`;
  badge.style.top = `${box.top + scrollY - 2}px`;
  document.body.append(badge);
}));
</script>
"""


def take_picture(page: Path, target: Path, height: int) -> None:
    """Write the top of a page as a PNG; SystemExit if it is too large or no browser is found."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        sys.exit("docs/pictures.py: chromium is not installed; install it")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    size = f"--window-size={WIDTH},{height}"
    subprocess.run(
        [program, *options, size, f"--screenshot={target}", page.as_uri()], check=True, timeout=300
    )
    if target.stat().st_size > MAX_BYTES:
        sys.exit(
            f"docs/pictures.py: {target} has more than {MAX_BYTES} bytes; take a smaller study"
        )


def main() -> None:
    """Write both pictures."""
    arguments = argparse.ArgumentParser(description="Make the pictures of a study's report.")
    arguments.add_argument("report", type=Path, help="report.html of the study `demo`")
    report = arguments.parse_args().report.resolve()
    take_picture(report, DOCS / "report.png", height=900)
    with tempfile.TemporaryDirectory() as folder:
        numbered = Path(folder, "report.html")
        text = report.read_text(encoding="utf-8")
        badges = BADGES.replace("PARTS", json.dumps(PARTS))
        numbered.write_text(text.replace("</body>", f"{badges}</body>"), encoding="utf-8")
        take_picture(numbered, DOCS / "tutorials/report.png", height=570)


if __name__ == "__main__":
    main()
