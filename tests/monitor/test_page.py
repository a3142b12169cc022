"""The report in a real browser, at the width of a desk and of a phone: everything fits, every chart is drawn."""

import html
import json
import re
import shutil
import subprocess

import pytest

from gpubound.monitor import write_report

from .tapes import gpu_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# The page in a frame of each width, measured in one visit: what does not fit, and text of a chart beyond its drawing.
FRAMES = """<!doctype html>{frames}<script>
addEventListener("load", () => {{
  const seen = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, all = s => [...page.querySelectorAll(s)], box = e => e.getBoundingClientRect();
    const free = all("figure, svg, table, h1, p, span, td, pre").filter(e => !e.closest(".wide"));
    return {{
      width: frame.clientWidth, scroll: page.documentElement.scrollWidth, right: Math.max(...free.map(e => box(e).right)),
      charts: all("svg").length, lines: all("polyline").map(l => l.getTotalLength()), text: page.body.innerText,
      clipped: all("svg text").filter(e => {{
        const [text, drawing] = [box(e), box(e.closest("svg"))];
        return text.right > drawing.right + 0.5 || text.left < drawing.left - 0.5 || text.bottom > drawing.bottom + 0.5;
      }}).map(e => e.textContent),
      attacked: all("script, img, [onload], [onerror]").length + (page.defaultView.attacked || 0),
    }};
  }});
  document.body.textContent = JSON.stringify(seen);
}});
</script>"""
WIDTHS = (390, 500, 1280)
ATTACK = "</pre></title><script>attacked = 1</script><img src=x onerror='attacked = 1'>"


def runs(folder):
    tapes = []
    for name in ("first", "second, with a name that does not end soon"):
        tape = gpu_run(folder / name[:5], name, steps=60)
        tape.tell(
            sample=ATTACK, fallbacks=[{"what": "a kernel", "why": "because " * 20, "times": 3}],
            config=tape.about["config"] | {"out": "runs/a/b/c", "data": ["a_long_folder_name/"] * 9, ATTACK: ATTACK},
            mfu="share of the rate = " + "6 · P " * 30, placement=tape.about["placement"] + "\n" + "x" * 300,
        )  # fmt: skip
        tapes.append(tape)
    return tapes


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_it_fits_and_runs_nothing_that_a_tape_says(tmp_path):
    page = html.escape(write_report(runs(tmp_path)).read_text())
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    done = subprocess.run(
        [*command, "--window-size=1400,1000", f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frames.html'}"],
        capture_output=True,
        text=True,
    )
    seen = json.loads(html.unescape(re.search(r"<body>(\[.*\])\s*</body>", done.stdout, re.S)[1]))
    assert [found["width"] for found in seen] == list(WIDTHS)
    for found in seen:
        assert found["scroll"] <= found["width"] and found["right"] <= found["width"] and found["clipped"] == []
        assert found["charts"] == 13 and len(found["lines"]) == 56 and sum(length > 50 for length in found["lines"]) > 40
        assert found["attacked"] == 0 and ATTACK in found["text"]
        assert "first against second" in found["text"] and "books: data" in found["text"]
