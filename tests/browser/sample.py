"""Makes the committed sample report, its picture and its numbers in the README: `python -m tests.browser.sample`."""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.browser.devtools import browser

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "reports" / "samples"
NAME = "03_handwritten_transformer"
OPEN_ATTENTION = """
for (const name of ["layers", "1", "attention"])
  [...document.querySelectorAll("#graph-box .node.module")].find((box) => box.textContent.startsWith(name))
    .dispatchEvent(new MouseEvent("click"));
document.activeElement.blur();
document.getElementById("graph").scrollIntoView()
"""


@dataclass(frozen=True)
class Shot:
    """One picture of the report: the window, the color scheme, and what is done before it is taken."""

    width: int
    height: int
    scheme: str
    script: str = ""


SHOTS = {
    "": Shot(1280, 1130, "light"),
    "-finding": Shot(
        1280,
        820,
        "light",
        "document.getElementById('finding-1').open = true; document.getElementById('findings').scrollIntoView()",
    ),
    "-graph": Shot(1280, 960, "dark", OPEN_ATTENTION),
    "-table": Shot(1280, 760, "light", "document.getElementById('layers').scrollIntoView()"),
    "-phone": Shot(390, 844, "dark"),
}


def main() -> None:
    """Audit the example, then write what the README shows of it."""
    SAMPLES.mkdir(exist_ok=True)
    page = SAMPLES / f"{NAME}.html"
    text = audited()
    page.write_text(text, encoding="utf-8")
    with browser() as opened:
        for name, shot in SHOTS.items():
            opened.open(page, width=shot.width, height=shot.height, scheme=shot.scheme)
            opened.run(f"document.documentElement.style.scrollBehavior = 'auto'; {shot.script}; 0")
            opened.run("new Promise((r) => setTimeout(r, 200))")
            (SAMPLES / f"{NAME}{name}.png").write_bytes(opened.screenshot())
    readme = ROOT / "README.md"
    readme.write_text(with_rows(readme.read_text(encoding="utf-8"), rows_of(text)), encoding="utf-8")


def audited() -> str:
    """The report, made in a copy of the examples so that it names no folder of this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT / "examples", Path(scratch, "examples"))
        command = [sys.executable, "-m", "auditor", f"examples/{NAME}.py", "--fail-on", "never", "-q"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=scratch, env=environment, check=True, stdout=subprocess.DEVNULL)
        text = Path(scratch, "audits", NAME, "report.html").read_text(encoding="utf-8")
        return text.replace(f"{Path(scratch).resolve()}/", "")


def rows_of(report: str) -> list[str]:
    """One Markdown row per plan of a report: its name, errors without it, predicted and measured, and speed-up."""
    table = report.partition('<section id="plans">')[2].partition("</table>")[0]
    rows = []
    for row in re.findall(r"<tr[^>]*><td.*?</tr>", html.unescape(table)):
        title, without, predicted, measured, _, speedup = re.findall(r"<td[^>]*>(.*?)</td>", row)
        name = f"{title[2:]} (recommended)" if title.startswith("* ") else title
        rows.append(f"| {' | '.join([name, without, predicted, measured, speedup])} |")
    return rows


def with_rows(readme: str, rows: list[str]) -> str:
    """The README with the rows of its first table replaced."""
    head, rule, rest = readme.partition("|---|---|---|---|---|\n")
    return head + rule + "\n".join(rows) + rest[rest.index("\n\n") :]


if __name__ == "__main__":
    main()
