"""Lines that the tests of results begin from."""

from dataclasses import replace

from benchmarks.results import Line

LINE = Line(
    bench="kernels",
    case="rms_norm forward 8b",
    ours=3912.0,
    peer=3600.0,
    peer_name="liger",
    unit="GB/s",
    ratio=1.087,
    gate=1.0,
    moonshot=None,
    spread=0.006,
    percent_of_ceiling=91.4,
    gpu="NVIDIA H200",
    driver="580.95.05",
    torch="2.11.0+cu130",
    triton="3.6.0",
    commit="0a55bec",
    dirty=False,
    date="2026-11-21T10:00:00+00:00",
    command="gpubound bench kernels",
)
SYNCS = replace(LINE, case="loss host syncs", unit="syncs", ours=0, peer=3, ratio=4.0, spread=None)
MISSED = replace(LINE, peer_name="copy rate", ratio=0.765, gate=0.85)
TRAIN = replace(LINE, bench="train", case="350m", unit="tok/s", ours=190_000, peer=170_000, ratio=1.118, gate=1.15)
