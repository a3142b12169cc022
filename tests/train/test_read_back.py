"""Whatever a run's files hold: what is read back is what was written, or one sentence that names the file.

Hypothesis makes the files, always the same ones; what an earlier search found stands here by name.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings, strategies as st

from gpubound.cli.train_options import Train, from_file
from gpubound.errors import DataError
from gpubound.train.checkpoint import Checkpoints, open_checkpoint
from gpubound.train.checkpoint.files import STATE, TENSORS
from tests import drawn
from tests.messages import message

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
