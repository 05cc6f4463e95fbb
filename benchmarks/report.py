"""Size of the HTML report and how soon a browser shows it, against the number of operations."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from auditor.reporters import html
from benchmarks.harness import Row, report, seconds
from tests.browser.devtools import Browser, browser
from tests.unit.report.factory import make_audit

SIZES = (30, 300, 3000)
OPENINGS = 9
SIZE_LIMIT, TIME_LIMIT = 1_000_000, 150
PAINT = """
new Promise((done) => {
  const look = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    const load = performance.getEntriesByType("navigation")[0];
    if (paint && load.loadEventEnd) done([paint.startTime, load.loadEventEnd]); else requestAnimationFrame(look);
  };
  look();
})
"""
COLUMNS = {
    "operations": "d",
    "render s": ".2f",
    "kB": ".0f",
    "first view ms": ".0f",
    "worst ms": ".0f",
    "loaded ms": ".0f",
}


def at_size(operations: int, page: Browser) -> Row:
    """Rendered once, opened several times; milliseconds count from the start of the navigation."""
    texts: list[str] = []
    audit = make_audit(operations)
    rendering = seconds(lambda: texts.append(html(audit)))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "report.html")
        file.write_text(texts[0], encoding="utf-8")
        shown = [opened(file, page) for _ in range(OPENINGS)]
    paints, loads = zip(*shown, strict=True)
    return {
        "operations": operations,
        "render s": rendering,
        "kB": len(texts[0].encode()) / 1000,
        "first view ms": statistics.median(paints),
        "worst ms": max(paints),
        "loaded ms": statistics.median(loads),
    }


def opened(file: Path, page: Browser) -> tuple[float, float]:
    """First contentful paint, and the end of the load event, after which everything is drawn and can be used."""
    page.open(file)
    paint, load = page.run(PAINT)
    return paint, load


def main() -> None:
    """Print the table, keep it, and fail where the largest report is over its limits."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with browser() as page:
        at_size(SIZES[0], page)  # a browser that has just started is slow to show anything
        rows = [at_size(size, page) for size in SIZES]
    report("report", rows, COLUMNS, {"openings": OPENINGS, "limits": {"bytes": SIZE_LIMIT, "ms": TIME_LIMIT}})
    largest = rows[-1]
    if largest["kB"] * 1000 > SIZE_LIMIT or not largest["first view ms"] <= TIME_LIMIT:
        raise SystemExit("over the limits")


if __name__ == "__main__":
    main()
