"""Checkpoints are whole or absent whatever happens while one is written, and read back as written or refused in a sentence."""

import dataclasses
import json
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings, strategies as st

from gpubound.cli.train_options import Train, from_file
from gpubound.errors import DataError
from gpubound.train.checkpoint import Checkpoints, open_checkpoint
from gpubound.train.checkpoint.files import STATE, TENSORS, Staging, read_state, write_state
from tests import drawn
from tests.messages import message, refusal

from .. import forked


def tensors(step):
    return {"weight": torch.full((64, 64), float(step)), "count": torch.tensor(step)}


def test_the_snapshot_is_of_the_moment_of_the_call(tmp_path):
    store, weight = Checkpoints(tmp_path), torch.ones(1 << 20)
    store.save(1, {"weight": weight}, {})
    weight.fill_(-1.0)  # the training goes on while the thread writes
    store.wait()
    assert store.latest().tensors()["weight"].min().item() == 1.0


def test_only_who_waits_for_the_disk_has_the_copies_made_on_the_host(tmp_path, monkeypatch):
    asked, take = [], Staging.take
    monkeypatch.setattr(Staging, "take", lambda *args: (asked.append(args[2]), take(*args))[1])
    store = Checkpoints(tmp_path)
    for step, wait in ((1, False), (2, True)):
        store.save(step, tensors(step), {}, wait=wait)
    assert asked == [False, True]


def test_views_of_one_storage_are_saved(tmp_path):
    flat = torch.arange(6.0)
    Checkpoints(tmp_path).save(1, {"a": flat[:2], "b": flat[2:]}, {}, wait=True)
    assert open_checkpoint(tmp_path / "step-00000001").tensors()["b"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_who_may_read_one_part_may_read_all(tmp_path):
    """Another user of the machine, or the one who started the container, goes on with it."""
    Checkpoints(tmp_path).save(1, tensors(1), {}, wait=True)
    tensor_file, state = ((tmp_path / "step-00000001" / name).stat() for name in ("tensors.safetensors", "state.json"))
    assert tensor_file.st_mode == state.st_mode


def test_newest_and_best_are_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for step, score in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 5.0), (50, 4.0), (60, 6.0)):
        store.save(step, tensors(step), {}, score=score, wait=True)
    assert [p.name for p in store.paths()] == ["step-00000020", "step-00000050", "step-00000060"]


def test_a_damaged_score_is_not_the_best(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    for step, score in ((1, 5.0), (2, 6.0)):
        store.save(step, tensors(step), {}, score=score, wait=True)
    state = tmp_path / "step-00000002" / "state.json"
    state.write_text(state.read_text().replace('"score": 6.0', '"score": 4.0'))
    store.save(3, tensors(3), {}, wait=True)
    assert [p.name for p in store.paths()] == ["step-00000001", "step-00000003"]


DAMAGED = "is damaged: its {} does not have the checksum that was written with it."
DAMAGES = {
    "cut off": DAMAGED.format("tensors.safetensors"),
    "a bit flipped": DAMAGED.format("tensors.safetensors"),
    "a fact changed": DAMAGED.format("state.json"),
    "another step": DAMAGED.format("state.json"),
    "a key lost": DAMAGED.format("state.json"),
    "no checksum": "is not a whole checkpoint: its state.json is not one that this version of gpubound writes.",
    "no state": "is not a whole checkpoint: [Errno 2] No such file or directory: '{}/state.json'.",
    "half a state": "is not a whole checkpoint: Unterminated string starting at: line 1 column 13 (char 12).",
    "no tensors": "is not a whole checkpoint: [Errno 2] No such file or directory: '{}/tensors.safetensors'.",
}


REWRITTEN = {
    "another step": ('"step": 5', '"step": 1'),
    "a key lost": ('"files"', '"miles"'),
    "no checksum": ('"state_crc32"', '"statf_crc32"'),
}


def do_damage(folder, damage) -> None:
    payload = bytearray((folder / "tensors.safetensors").read_bytes())
    state = (folder / "state.json").read_text()
    if damage == "cut off":
        (folder / "tensors.safetensors").write_bytes(payload[:-10])
    elif damage == "a bit flipped":
        payload[-5] ^= 1
        (folder / "tensors.safetensors").write_bytes(payload)
    elif damage == "a fact changed":
        (folder / "state.json").write_text(state.replace('"batch": 5', '"batch": 4'))
    elif damage in REWRITTEN:
        old, new = REWRITTEN[damage]
        assert old in state
        (folder / "state.json").write_text(state.replace(old, new))
    elif damage == "half a state":
        (folder / "state.json").write_text('{"step": 2, "fa')
    else:
        (folder / {"no state": "state.json", "no tensors": "tensors.safetensors"}[damage]).unlink()


@pytest.mark.parametrize("damage, sentence", DAMAGES.items(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped_aloud(tmp_path, damage, sentence, said):
    """And those after it do not count it among the newest, which are kept."""
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 5):
        store.save(step, tensors(step), {"batch": step}, wait=True)
    newest = tmp_path / "step-00000005"
    do_damage(newest, damage)
    assert store.latest().step == 1
    assert said() == message("train/checkpoint:a_damaged_checkpoint_is", newest, sentence.format(newest))
    assert refusal(DataError, lambda: open_checkpoint(newest)) == f"{newest} {sentence.format(newest)}"
    for step in (2, 3):
        store.save(step, tensors(step), {"batch": step}, wait=True)
    assert [p.name for p in store.paths()] == ["step-00000002", "step-00000003"]


def test_a_folder_with_another_step_s_name_is_skipped(tmp_path):
    store = Checkpoints(tmp_path)
    for step in (2, 4):
        store.save(step, tensors(step), {}, wait=True)
    misnamed = (tmp_path / "step-00000002").rename(tmp_path / "step-00000009")
    assert store.latest().step == 4
    with pytest.raises(DataError, match="holds step 2"):
        open_checkpoint(misnamed)


def test_a_full_disk_is_an_error_and_costs_nothing(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path)
    store.save(1, tensors(1), {}, wait=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpubound.train.checkpoint.files.write_tensors", full)
    store.save(2, tensors(2), {})
    assert refusal(DataError, store.wait) == message("train/checkpoint:a_full_disk_is_an_error", tmp_path)
    assert store.latest().step == 1 and sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001"]


def test_keep_nothing_is_refused(tmp_path):
    assert refusal(ValueError, lambda: Checkpoints(tmp_path, keep=0)) == message("train/checkpoint:keep_nothing_is_refused")


KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)  # the forked children must not inherit a thread pool
    from gpubound.train.checkpoint import Checkpoints
    random.seed(0)
    folder, seen, cut_off = Path(sys.argv[1]), 0, 0

    def save(step):
        store.save(step, {"weight": torch.full((256, 256), float(step))}, {"twice": 2 * step}, wait=True)

    def kill_at(operation):
        left = [operation]
        def count(event, arguments):
            if event.startswith(("open", "os.", "shutil.")):
                left[0] -= 1
                left[0] or os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)

    for trial in range(30):
        hear, tell = os.pipe()
        if (child := os.fork()) == 0:
            store = Checkpoints(folder)
            save(seen + 1), save(seen + 2)
            os.write(tell, b".")
            if trial < 22:
                kill_at(trial + 1)
            for step in range(seen + 3, seen + 1000):
                save(step)
        os.read(hear, 1)
        if trial >= 22:
            time.sleep(random.uniform(0, 0.006))
            os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(hear), os.close(tell)
        cut_off += trial < 22 and any(folder.glob(".step-*"))
        found = Checkpoints(folder).latest()
        weight = found.tensors()["weight"]
        assert weight.min() == weight.max() == found.step and found.facts["twice"] == 2 * found.step, found
        assert found.step >= seen + 2, (found.step, seen)
        seen = found.step
    print("survived", cut_off >= 5)
"""


@pytest.mark.slow
def test_killed_in_the_middle_and_always_whole(tmp_path):
    """A child saves without end and is killed with -9; whatever it leaves, `latest` is whole, consistent and no older.

    22 times at its first, second, ... operation on a file after two whole checkpoints (a save makes about twenty: five between
    creating the temporary folder and renaming it, the rest prune), then 8 times at a random moment, which may be inside the
    writing of the tensors.
    """
    command = [forked.python(), "-W", "ignore", "-c", textwrap.dedent(KILLED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "survived True", done.stdout + done.stderr


@pytest.mark.gpu
def test_from_the_gpu_and_back(tmp_path):
    """What is larger than the pinned buffer, odd in size, without dimensions, empty or of one byte, and a later write."""
    given = {
        "large": torch.randn(5_000_001), "odd": torch.randn(3, 7).bfloat16(), "count": torch.tensor(7.0, dtype=torch.float64),
        "none": torch.empty(0), "bytes": torch.arange(256, dtype=torch.uint8), "turned": torch.randn(64, 33).t(),
    }  # fmt: skip
    there = {name: t.cuda() for name, t in given.items()} | {"host": torch.arange(5)}
    store = Checkpoints(tmp_path)
    store.save(1, there, {})
    for t in there.values():
        t.zero_()
    store.wait()
    got = store.latest().tensors()
    assert all(torch.equal(got[name], t) for name, t in given.items()) and got["host"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_the_benchmark_runs(capsys):
    from benchmarks.bench_checkpoint import main

    assert main(["--dry", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert message("train/checkpoint:the_benchmark_runs").within(said) and "nothing kept (dry)" in said


def test_a_checkpoint_of_an_earlier_state_file_is_read(tmp_path):
    """One process named the size and checksum of its only file as keys of their own."""
    path = tmp_path / "step-00000003"
    Checkpoints(tmp_path).save(3, tensors(3), {"loss": 2.5}, wait=True)
    state = read_state(path)
    (state["bytes"], state["crc32"]), _ = state.pop("files")["tensors.safetensors"], state.pop("sharded")
    write_state(path, state)
    assert "files" not in json.loads((path / "state.json").read_text())
    found = open_checkpoint(path)
    assert (found.step, found.facts) == (3, {"loss": 2.5})
    (path / "tensors.safetensors").write_bytes(b"0")
    with pytest.raises(DataError, match="tensors"):
        open_checkpoint(path)


bounded = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])

KEYS = [field.name for field in dataclasses.fields(Train)]
ODD = ("1e-3", "nan", "1e999", "\0", "[/b]", "1_000", "0x10", "999999999999 GB", "٣", "cuda:9", "")
leaves = st.none() | st.booleans() | st.integers() | st.floats() | drawn.text(max_size=8) | st.sampled_from(ODD)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(drawn.text(max_size=3), inner, max_size=3)
)
phases = st.lists(st.dictionaries(st.sampled_from([*KEYS, "name"]), leaves, max_size=4), max_size=3)
configs = st.dictionaries(st.sampled_from(KEYS) | drawn.text(max_size=5) | st.integers(0, 3), values, max_size=5)
LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'lol'}]\n" for n in range(12))


def read_config(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        from_file(str(path))
    except (ValueError, DataError) as error:
        assert str(path) in str(error) and len(str(error)) < 2000


@pytest.mark.slow
@settings(bounded, max_examples=100)
@given(configs | st.builds(lambda given: {"phases": given}, phases))
def test_a_config_of_any_values(tmp_path, config):
    read_config(tmp_path / "c.yaml", yaml.safe_dump(config, allow_unicode=True).encode("utf-8", "surrogatepass"))


@settings(bounded, max_examples=100)
@given(st.binary(max_size=60) | st.text(alphabet="-:[]{}&*!|>%@`\"'#,? \n\tabc019.", max_size=60).map(str.encode))
@example(b"[" * 500)
@example(b"a: " + b"9" * 5000)
@example(b"steps: 2020-13-45")
@example(b"steps: &a [*a]")
@example(b"phases: &a [{phases: *a}]")
@example(LAUGHS.encode() + b"steps: *a11")
@example(LAUGHS.replace("a0: ", "data: ").encode() + b"phases: [*a11]")
@example(b"k" * 9000 + b": 1")
@example(b"\xff\xfea\x00")
def test_a_config_of_any_bytes(tmp_path, content):
    read_config(tmp_path / "c.yaml", content)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    store = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    for step in (3, 60):
        store.save(step, {"weight": torch.full((4,), float(step))}, {"phase": 0, "over": False, "evaluations": {}}, wait=True)
    return store


def found(store: Checkpoints) -> int:
    """The step that a resumed run would begin at, after its content has been compared with that step's."""
    checkpoint = store.latest()
    assert checkpoint.facts == {"phase": 0, "over": False, "evaluations": {}}
    assert checkpoint.tensors()["weight"].tolist() == [float(checkpoint.step)] * 4
    return checkpoint.step


def test_a_flipped_bit_in_each_byte_of_a_checkpoint(two_checkpoints, monkeypatch):
    """The intact older one is found, or the newer one as it was written: a flip in a space or an exponent's letter.

    One bit of each byte, another one from byte to byte.
    """
    monkeypatch.setattr("gpubound.train.checkpoint.checkpoints.notice", lambda text: None)
    newest = two_checkpoints.folder / "step-00000060"
    for name in (STATE, TENSORS):
        whole = (newest / name).read_bytes()
        for byte in range(len(whole)):
            flipped = bytearray(whole)
            flipped[byte] ^= 1 << byte % 8
            (newest / name).write_bytes(flipped)
            assert found(two_checkpoints) == 3 or json.loads(flipped) == json.loads(whole)
        (newest / name).write_bytes(whole)
    assert found(two_checkpoints) == 60


@settings(bounded, max_examples=20)
@given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"state_crc32": 0}')
@example(b'{"state_crc32": 2745614147, "step": []}')
@example(b"9" * 5000)
def test_a_state_of_any_content(two_checkpoints, content):
    state = two_checkpoints.folder / "step-00000060" / STATE
    whole = state.read_bytes()
    try:
        state.write_bytes(content)
        with pytest.raises(DataError, check=message("train/read_back:a_state_of_any_content")):
            open_checkpoint(state.parent)
    finally:
        state.write_bytes(whole)
