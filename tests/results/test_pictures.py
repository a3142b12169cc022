"""README's picture, the curves, and the marked parts that figures are written into."""

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from benchmarks import bars, curves, figures, scaling
from benchmarks.results import append
from tests.messages import message

from .example import LINE, MISSED, TRAIN


def test_bars_are_as_long_as_the_ratio_of_one_run_says():
    older = replace(TRAIN, peer_name="hf", ours=180_000, peer=90_000, ratio=2.0, gate=None, date="2026-11-20T10:00:00+00:00")
    limits = [replace(TRAIN, peer_name=name, ratio=0.6) for name in ("bf16 rate", "budget")]
    ((_, found),) = bars.panels([TRAIN, older, *limits, replace(TRAIN, unit="GiB")])
    assert [(bar.name, round(bar.share, 3)) for bar in found] == [("gpubound", 1.0), ("Liger", 0.894), ("Hugging Face", 0.5)]
    assert found[0].words == "190,000 tok/s" and found[2].words == message("results/pictures:bars_are_as_long_as_the")
    near = replace(older, ours=188_000, ratio=2.09)
    assert bars.panels([TRAIN, near])[0][1][2].words == message("results/pictures:bars_are_as_long_as_the.2")


def test_a_faster_peer_has_the_longest_bar():
    found = bars.panels([replace(TRAIN, peer=380_000, ratio=0.5)])
    root = ElementTree.fromstring(bars.picture(found, "dark"))
    ours, peer = [int(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert peer == bars.LONGEST and ours * 2 == peer


def decoding(rows, peer, ours, theirs):
    return replace(
        LINE, bench="decode", case=f"1b batch {rows}", unit="tok/s", peer_name=peer, ours=ours, peer=theirs, gate=None
    )


def test_a_curve_goes_through_what_was_measured():
    lines = [decoding(rows, "graph", 900.0 * rows, 300.0 * rows) for rows in (1, 2, 4, 8)]
    lines += [decoding(rows, "roofline", 900.0 * rows, 1_800.0 * rows) for rows in (1, 8)]
    assert curves.curves(lines[:3]) == []  # three sizes make no curve
    other = replace(decoding(1, "graph", 5.0, 5.0), case="1b batch 1 int4")
    (found,) = drawn = curves.curves([*lines, other, replace(lines[0], bench="deepseek")])
    assert found.lines["gpubound"] == {1: 900, 2: 1800, 4: 3600, 8: 7200} and found.lines["roofline"] == {1: 1800, 8: 14400}
    assert message("results/pictures:a_curve_goes_through_wha").within(curves.told(drawn))
    root = ElementTree.fromstring(curves.picture(drawn, "light"))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    ours, theirs = dots[:4], dots[4:]
    steps = {round(a[0] - b[0]) for line in (ours, theirs) for a, b in pairwise(line)}
    assert len(steps) == 1  # rows double from dot to dot
    assert all(high[1] < low[1] for high, low in zip(ours, theirs))
    assert 'fill="none"' in curves.picture(drawn, "dark") and "1b" in curves.picture(drawn, "dark")


def test_the_curve_stands_above_the_table_of_decoding(tmp_path):
    a_readme(tmp_path)
    append([decoding(rows, "graph", 900.0 * rows, 300.0 * rows) for rows in (1, 2, 4, 8)], tmp_path / "results")
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    page = (tmp_path / "docs/figures.md").read_text()
    assert page.index("## Decoding") < page.index("images/decoding-dark.svg#only-dark") < page.index("| 1b batch 1 |")
    assert all((tmp_path / f"docs/images/decoding-{theme}.svg").exists() for theme in ("light", "dark"))


def a_readme(folder):
    text = f"# top\n{figures.BEGIN}stale words\n{figures.END}\nmiddle\nrest\n"
    (folder / "README.md").write_text(text)
    return folder / "README.md"


def test_figures_write_the_page_the_pictures_and_only_the_marked_parts_of_readme(tmp_path, capsys):
    readme = a_readme(tmp_path)
    append([TRAIN, MISSED], tmp_path / "results")
    assert figures.main(["--check"], tmp_path, tmp_path / "results") == 1
    assert "README.md, docs/figures.md, docs/images/speed-light.svg" in capsys.readouterr().err
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    text = readme.read_text()
    assert text.startswith("# top\n<!-- figures -->\n<picture>") and "\nmiddle\n" in text and text.endswith("\nrest\n")
    assert "stale" not in text and "190,000 tok/s" in (tmp_path / "docs/figures.md").read_text()
    assert figures.main(["--check"], tmp_path, tmp_path / "results") == 0


def ranks(case, peer, ours, theirs):
    return replace(
        LINE, bench="ranks", case=case, unit="tok/s", peer_name=peer, ours=ours, peer=theirs, ratio=ours / theirs, gate=None
    )


def test_several_gpus_are_drawn_together_beside_one_of_them(tmp_path):
    lines = [ranks(f"350m on {world}", "one GPU", 90.0, 100.0) for world in (2, 4)]
    lines += [ranks("350m on 4", "ddp-liger", 90.0, 60.0), ranks("8b on 2", "fsdp-liger", 10.0, 10.0)]
    lines += [ranks("8b on 4", "fsdp-liger", 11.0, 22.0), ranks("8b on 4 speed", "wanted", 11.0, 9.0)]
    (title, replicas), (of_shards, shards) = scaling.panels(lines)
    assert "350M" in title and [(bar.name, bar.words) for bar in replicas] == [
        ("1 GPU", "100 tok/s"), ("2 GPUs", "180 tok/s  (1.80 x one)"), ("4 GPUs", "360 tok/s  (3.60 x one)")
    ]  # fmt: skip
    assert [bar.share for bar in replicas] == pytest.approx([100 / 360, 0.5, 1.0])
    assert "of 4 GPUs" in of_shards and [(bar.name, bar.share) for bar in shards] == [("gpubound", 1.0), ("FSDP2, Liger", 2.0)]
    a_readme(tmp_path)
    append(lines, tmp_path / "results")
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    assert "3.60 x one" in (tmp_path / "docs/images/scaling-light.svg").read_text()
    assert all((tmp_path / f"docs/images/scaling-{theme}.svg").exists() for theme in ("light", "dark"))


@pytest.mark.parametrize("text", ["nothing", "<!-- /figures --> <!-- figures -->\n", "<!-- figures -->\n"])
def test_a_readme_without_the_markers(tmp_path, capsys, text):
    (tmp_path / "README.md").write_text(text)
    assert figures.main([], tmp_path, tmp_path) == 2
    assert message("results/pictures:a_readme_without_the_mar").within(capsys.readouterr().err)
    assert (tmp_path / "README.md").read_text() == text
