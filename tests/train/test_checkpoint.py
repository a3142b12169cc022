"""Checkpoints: whole or absent, whatever happens while one is written."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from gpubound import trace
from gpubound.errors import DataError
from gpubound.train.checkpoint import Checkpoints, open_checkpoint


def tensors(step):
    return {"weight": torch.full((64, 64), float(step)), "count": torch.tensor(step)}


def test_what_is_saved_comes_back(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(7, tensors(7), {"data": {"epoch": 1}}, wait=True)
    got = store.latest()
    assert got.step == 7 and got.facts == {"data": {"epoch": 1}}
    assert torch.equal(got.tensors()["weight"], torch.full((64, 64), 7.0)) and got.tensors()["count"].item() == 7


def test_the_snapshot_is_of_the_moment_of_the_call(tmp_path):
    store, weight = Checkpoints(tmp_path), torch.ones(1 << 20)
    store.save(1, {"weight": weight}, {})
    weight.fill_(-1.0)  # the training goes on while the thread writes
    store.wait()
    assert store.latest().tensors()["weight"].min().item() == 1.0


def test_views_of_one_storage_are_saved(tmp_path):
    flat = torch.arange(6.0)
    Checkpoints(tmp_path).save(1, {"a": flat[:2], "b": flat[2:]}, {}, wait=True)
    assert open_checkpoint(tmp_path / "step-00000001").tensors()["b"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_newest_best_and_grid_are_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=2, keep_every=40)
    for step, score in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 5.0), (50, 4.0), (60, 6.0)):
        store.save(step, tensors(step), {}, score=score, wait=True)
    assert [p.name for p in store._paths()] == ["step-00000020", "step-00000040", "step-00000050", "step-00000060"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "half state"])
def test_a_damaged_checkpoint_is_skipped_aloud(tmp_path, damage, capsys, monkeypatch):
    monkeypatch.setattr(trace, "_said", set())
    store = Checkpoints(tmp_path)
    for step in (1, 2):
        store.save(step, tensors(step), {}, wait=True)
    newest = tmp_path / "step-00000002"
    payload = bytearray((newest / "tensors.safetensors").read_bytes())
    if damage == "truncate":
        (newest / "tensors.safetensors").write_bytes(payload[:-10])
    elif damage == "flip":
        payload[-5] ^= 1
        (newest / "tensors.safetensors").write_bytes(payload)
    elif damage == "no state":
        (newest / "state.json").unlink()
    else:
        (newest / "state.json").write_text('{"step": 2, "fa')
    assert store.latest().step == 1
    assert "step-00000002" in capsys.readouterr().err


def test_none_at_all(tmp_path):
    assert Checkpoints(tmp_path / "nothing").latest() is None


def test_a_full_disk_is_an_error_and_costs_nothing(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path)
    store.save(1, tensors(1), {}, wait=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpubound.train.checkpoint.save_file", full)
    store.save(2, tensors(2), {})
    with pytest.raises(DataError) as error:
        store.wait()
    assert str(error.value) == (
        f"the checkpoint could not be written: [Errno 28] No space left on device; "
        f"earlier checkpoints in {tmp_path} are intact. Free space or choose another folder."
    )
    assert store.latest().step == 1 and sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001"]


def test_keep_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        Checkpoints(tmp_path, keep=0)
    assert str(error.value) == "Checkpoints: keep must be at least 1, got 0; the newest one is what a resumed run needs."


def test_killed_fifty_times_while_writing_and_always_whole(tmp_path):
    """A child saves without end and is killed at a random moment; whatever it leaves, `latest` is whole and consistent."""
    script = """
        import os, random, signal, sys, time
        from pathlib import Path
        import torch
        torch.set_num_threads(1)  # the forked children must not inherit a thread pool
        from gpubound.train.checkpoint import Checkpoints
        random.seed(0)
        folder, seen = Path(sys.argv[1]), 0
        for trial in range(50):
            if (child := os.fork()) == 0:
                store = Checkpoints(folder)
                while True:
                    seen += 1
                    store.save(seen, {"weight": torch.full((256, 256), float(seen))}, {"twice": 2 * seen}, wait=True)
            time.sleep(random.uniform(0.005, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = Checkpoints(folder).latest()
            if found:
                weight = found.tensors()["weight"]
                assert weight.min() == weight.max() == found.step and found.facts["twice"] == 2 * found.step, found
                assert found.step >= seen, (found.step, seen)
                seen = found.step
        print("survived", seen > 0)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "survived True", done.stderr


def test_state_is_readable_json(tmp_path):
    Checkpoints(tmp_path).save(3, tensors(3), {"loss": 2.5}, wait=True)
    state = json.loads((tmp_path / "step-00000003" / "state.json").read_text())
    assert state["step"] == 3 and state["facts"] == {"loss": 2.5} and state["bytes"] > 64 * 64 * 4
