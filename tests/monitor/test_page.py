"""The report in a real browser, at the width of a desk and of a phone: everything fits, every chart is drawn."""

import html
import json
import re
import shutil
import subprocess

import pytest

from gpubound.monitor import Tape, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

FRAME = """<!doctype html><iframe id=page width={width} height=900 srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const seen = document.getElementById("page").contentDocument, all = s => [...seen.querySelectorAll(s)];
  const free = all("figure, svg, table, h1, p, span").filter(e => !e.closest(".wide"));
  const right = Math.max(...free.map(e => e.getBoundingClientRect().right));
  document.body.textContent = JSON.stringify({{
    scroll: seen.documentElement.scrollWidth, right, charts: all("svg").length,
    lines: all("polyline").map(l => l.getTotalLength()), text: seen.body.innerText,
  }});
}});
</script>"""


def runs(folder):
    tapes = []
    for name in ("first", "second, with a name that does not end soon"):
        tape = Tape.create(
            folder / name[:5], name=name, verdict="60 steps on CPU, loss 9 to 7.", mfu="share of the rate = " + "6 · P " * 30,
            config={"out": "runs/a/b/c", "phases": [{"name": "books", "data": ["a_long_folder_name/"] * 9, "steps": 300}]},
            placement="module  kernel\n" + "x" * 300, fallbacks=[{"what": "a kernel", "why": "because " * 20, "times": 3}],
        )  # fmt: skip
        for step in range(1, 61):
            tape.append({"step": step, "loss": 9 - step / 30, "held_out": 8.5, "tokens_per_s": 1e4 + step, "power_w": 600.0})
        tapes.append(tape)
    return tapes


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits(tmp_path, width):
    page = write_report(runs(tmp_path)).read_text()
    (tmp_path / "frame.html").write_text(FRAME.format(width=width, page=html.escape(page)))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frame.html'}"],
        capture_output=True,
        text=True,
    )
    found = json.loads(html.unescape(re.search(r"<body>(\{.*\})\s*</body>", done.stdout, re.S)[1]))
    assert found["scroll"] <= width and found["right"] <= width
    assert found["charts"] == 3 and len(found["lines"]) == 8 and all(length > 50 for length in found["lines"])
    assert "first against second" in found["text"] and "books: data" in found["text"]
