"""The report in a real browser: nothing complains, anchors lead somewhere, every table sorts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import fixture_records as fixture
import pytest
from browser import NO_BROWSER, OPTIONS, find_chromium
from test_analysis_report import write_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Leaves what it saw as JSON in the page's title.
VISIT = """<script>
addEventListener("load", function () {
  var tally = document.querySelector(".tally").getBoundingClientRect();
  var seen = { answered_px: tally.bottom, height_px: document.documentElement.scrollHeight };
  seen.dark = getComputedStyle(document.body).backgroundColor;
  document.querySelectorAll("details").forEach(function (d) { d.open = true; });
  seen.scales = Array.from(document.querySelectorAll("figure")).map(function (figure) {
    return figure.querySelector("img").clientWidth / figure.style.getPropertyValue("--pt");
  });
  Object.assign(seen, { tables: 0, columns: 0, numeric: 0 });
  Object.assign(seen, { unsorted: [], lost: [], dangling: [], broken: [] });
  document.querySelectorAll("table.sortable").forEach(function (table, t) {
    seen.tables++;
    var before = table.tBodies[0].rows.length;
    table.querySelectorAll("thead th").forEach(function (th, column) {
      var button = th.querySelector("button");
      if (!button) return;
      seen.columns++;
      ["ascending", "descending"].forEach(function (wanted) {
        button.click();
        var texts = Array.from(table.tBodies[0].rows).map(function (row) {
          var cell = row.cells[column], given = cell.dataset.sort;
          return given === undefined ? cell.textContent.trim() : given;
        });
        var filled = texts.filter(function (x) { return x !== ""; });
        var emptyLast = texts.slice(filled.length).every(function (x) { return x === ""; });
        var numbers = filled.map(Number);
        var ordered = numbers.some(isNaN) || numbers.every(function (x, i) {
          return i === 0 || (wanted === "ascending" ? numbers[i - 1] <= x : numbers[i - 1] >= x);
        });
        if (filled.length > 1 && !numbers.some(isNaN)) seen.numeric++;
        if (!ordered || !emptyLast || th.getAttribute("aria-sort") !== wanted)
          seen.unsorted.push(t + ":" + th.textContent + ":" + wanted);
        if (texts.length !== before) seen.lost.push(t + ":" + th.textContent);
      });
    });
  });
  document.querySelectorAll("a[href^='#']").forEach(function (a) {
    if (!document.getElementById(a.getAttribute("href").slice(1))) seen.dangling.push(a.href);
  });
  document.querySelectorAll("img").forEach(function (image) {
    if (!image.complete || image.naturalWidth === 0) seen.broken.push(image.alt);
  });
  seen.images = document.querySelectorAll("img").length;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = "seen:" + JSON.stringify(seen) + ":end";
});
</script></body>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = find_chromium()
    if found is None:
        pytest.skip(NO_BROWSER)
    return found


@pytest.fixture(scope="module")
def visited_page(tmp_path_factory) -> Path:
    """A report with every section, whose script visits all of it."""
    folder = tmp_path_factory.mktemp("browser")
    prediction = (
        "experiment,strategy,peak_mib_predicted,peak_mib_measured,peak_error_percent,"
        "states_bytes_predicted,states_bytes_measured,states_error_percent,"
        "sent_bytes_predicted,sent_bytes_measured,sent_error_percent,train_s_in_range\n"
        "main,ddp,101,100,1.0,8,8,0.0,5,5,0.0,True\nmain,ps-dana,98,100,-2.0,8,8,0.0,5,5,0.0,False\n"
    )
    names = ("single", "ddp", "fsdp", "ps-sync", "ps-async", "ps-dana")
    cells = fixture.expand(strategies=names, models=("vgg16", "convnext_large"), repeats=2)
    path = write_page(
        folder,
        cells,
        fixture.DEMO_STATUSES,
        options=("--partial",),
        timelines=True,
        prediction=prediction,
    )
    trial = path.with_name("trial.html")
    trial.write_text(path.read_text().replace("</body>", VISIT))
    return trial


#: Height of the first screen of a laptop and of a phone, by their widths.
SCREENS_PX = {1280: 720, 420: 900}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", SCREENS_PX)
def test_everything_works_at_desktop_and_phone_width(chromium, visited_page, tmp_path, width, dark):
    done = subprocess.run(
        [
            *(chromium, *OPTIONS, "--enable-logging=stderr", f"--user-data-dir={tmp_path}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(f"--window-size={width},900", "--dump-dom", f"file://{visited_page}"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    seen = json.loads(re.search(r"<title>seen:(.*):end</title>", done.stdout, re.DOTALL)[1])
    for fault in ("unsorted", "lost", "dangling", "broken"):
        assert seen[fault] == [], fault
    assert seen["tables"] > 20
    assert seen["numeric"] > 40
    assert seen["images"] == 13
    assert seen["overflow"] <= 0  # the page itself never scrolls sideways
    assert seen["answered_px"] < SCREENS_PX[width]
    assert seen["height_px"] < 12_000
    assert seen["dark"] == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    if width == 1280:  # text is of one size in all figures
        assert max(seen["scales"]) / min(seen["scales"]) < 1.01
