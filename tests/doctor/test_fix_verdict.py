"""A verdict's findings get their patches: each its own, all together in one repair, the harmless none."""

from dataclasses import replace

from gpubound.doctor.finding import Finding
from gpubound.doctor.fix.repair import patched
from gpubound.watch.source_line import Site
from tests.messages import message

from .verdicts import judged, looped

SCRIPT = """\
import torch
total = 0.0
for step in range(9):
    optimizer.zero_grad(False)
    torch.cuda.synchronize()
    total += loss.item()
"""


def test_findings_get_their_patches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def found(kind: str, line: int | None) -> Finding:
        site = Site(str(script), line, "<module>", "", line) if line else None
        return Finding(kind, site, None, "", None, 1, 0.5, "replayed", "", "mend it")

    harmless = found("sync", 6)
    verdict = replace(
        judged(*looped()),
        findings=[found("zero_grad", 4), found("sync", 5), found("precision", 3), found("launch_bound", None)],
        harmless=[harmless],
    )
    after, made = patched(verdict)
    first, second, third, whole = (finding.patch for finding in after.findings)
    assert first.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert message("doctor/fix_verdict:findings_get_their_patch").within(first) and "-    torch" not in first
    assert "-    torch.cuda.synchronize()\n" in second and "zero_grad()" not in second
    assert (third, whole) == ("", "") and list(after.harmless) == [harmless]
    assert made.changes[script][1].decode() == SCRIPT.replace("(False)", "()").replace("    torch.cuda.synchronize()\n", "")
    assert len(made.patches) == 2 and len(made.refused) == 1  # what has no line is no target
    asked, _ = patched(verdict, asked=["tf32"])
    assert "+torch.set_float32_matmul_precision" in asked.findings[2].patch
