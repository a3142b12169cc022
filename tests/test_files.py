"""Files from outside: what is refused, and that each refusal names the file."""

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys

import pytest

from gpubound import lora, trace
from gpubound.data import train_tokenizer
from gpubound.doctor.finding import Verdict
from gpubound.doctor.report import write_reports
from gpubound.errors import DataError
from gpubound.files import LOCK, locked, read_json, reading, regular, sibling, write_atomic, writing
from gpubound.models import PRESETS, Decoder, load_hf, save_hf
from tests.messages import message


def refused(call, *arguments, kind=DataError):
    with pytest.raises(kind) as error:
        call(*arguments)
    return str(error.value)


def test_only_regular_files_are_opened(tmp_path, monkeypatch):
    pipe, folder, plug, missing = (tmp_path / name for name in ("pipe", "folder", "plug", "missing"))
    os.mkfifo(pipe)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)
        server.bind("plug")  # the whole path may be longer than the 108 bytes of a socket's name
        assert refused(regular, plug) == message("files:only_regular_files_are_o", plug)
    assert refused(regular, pipe) == message("files:only_regular_files_are_o.2", pipe)
    assert refused(read_json, pipe) == message("files:only_regular_files_are_o.3", pipe)  # and not a hang
    assert refused(regular, folder) == message("files:only_regular_files_are_o.4", folder)
    assert "/dev/null: is a device" in refused(read_json, type(tmp_path)("/dev/null"))
    assert refused(regular, missing) == message("files:only_regular_files_are_o.5", missing)
    assert "cannot be read" in refused(regular, tmp_path / "a\0b")
    (tmp_path / "link").symlink_to(missing)
    assert "cannot be read" in refused(regular, tmp_path / "link")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (b'{"a":' + b"[" * 200_000, "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"[1]", "holds a JSON list, wanted an object"),
        (b"null", "holds a JSON NoneType, wanted an object"),
    ],
    ids=["empty", "cut", "utf-16", "deep", "long number", "list", "null"],
)
def test_what_is_not_a_json_object(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    sentence = refused(read_json, path, "build it anew")
    assert sentence.startswith(f"{path}: {said}") and sentence.endswith("; build it anew.") and "\n" not in sentence


def test_a_listing_names_only_files_beside_it(tmp_path):
    listing = tmp_path / "corpus.json"
    assert sibling(listing, "a.gbt") == tmp_path / "a.gbt" and sibling(listing, "..a") == tmp_path / "..a"
    for name in ("../a", "/etc/passwd", "b/a", "..", ".", "", "a/", "a\0b", 3, None, ["a"]):
        assert refused(sibling, listing, name) == message("files:a_listing_names_only_fil", listing, repr(name))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, '{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert read_json(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]


def fail(manager, path, number):
    with manager(path):
        raise OSError(number, os.strerror(number))


def test_what_the_system_says_gets_the_files_name(tmp_path):
    path = tmp_path / "shard"
    assert refused(fail, reading, path, errno.EIO).startswith(f"{path}: cannot be read: Input/output error; ")
    assert refused(fail, writing, path, errno.EFBIG).startswith(f"{path}: cannot be written: File too large; ")
    with pytest.raises(OSError, check=message("files:what_the_system_says_get", path)) as error:
        fail(writing, path, errno.ENOSPC)
    assert error.value.errno == errno.ENOSPC  # by which commands know a full disk


def test_where_nothing_can_be_written_the_reason_is_told(tmp_path):
    """Taking the unfinished file away fails there, too, and must not be what is told."""
    (tmp_path / "file").touch()
    long, below = tmp_path / ("n" * 255), tmp_path / "file" / "run"
    cure = "check its permissions, its disk and its quota."
    assert refused(write_atomic, long, "") == message("files:where_nothing_can_be_wri", long, cure)
    assert refused(save_hf, Decoder(PRESETS["tiny"]), below) == message("files:where_nothing_can_be_wri.2", below, cure)
    with pytest.raises(DataError, check=message("files:where_nothing_can_be_wri.3", below)), locked(below):
        pass


def test_a_run_whose_folder_goes_away_tells_of_that(tmp_path):
    """Its lock's file is gone by then, and no more of a hindrance."""
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "run").touch()  # below a file nothing can be removed
        1 / 0  # noqa: B018


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"weight_map": {"a": "../stolen.safetensors"}}', "names the file '../stolen.safetensors', wanted the name of a file"),
        ('{"weight_map": {"a": "/stolen.safetensors"}}', "names the file '/stolen.safetensors', wanted the name of a file"),
        ('{"weight_map": {"a": 3}}', "weight_map: wanted "),
        ('{"weight_map": ["model.safetensors"]}', "weight_map: wanted "),
        ("{}", "weight_map: wanted "),
        ("[", "is not JSON"),
    ],
)
def test_a_models_index_names_only_files_beside_it(tmp_path, content, said):
    folder = save_hf(Decoder(PRESETS["tiny"]), tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "stolen.safetensors")
    (folder / INDEX).write_text(content)
    assert refused(load_hf, folder).startswith(f"{folder / INDEX}: {said}")


HOLD = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, sys.argv[2].encode())
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder, about: str) -> subprocess.Popen:
    """Another process that has the lock, and says so."""
    command = [sys.executable, "-c", HOLD, str(folder / LOCK), about]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


@pytest.mark.parametrize(
    "about, described",
    [
        (f'{{"pid": 7, "host": "{"a" * 99}", "since": "noon"}}', f"process 7 on {'a' * 99} (since noon)"),
        ("", "another process"),
        ("[1]", "another process"),
        ('{"pid": 7}', "another process"),
    ],
)
def test_another_process_has_it_until_it_is_killed(tmp_path, about, described):
    with hold(tmp_path, about) as child:
        with pytest.raises(ValueError) as error, locked(tmp_path):
            pass
        assert str(error.value) == message("files:another_process_has_it_u", tmp_path, described)
        child.kill()
        child.wait()
        with locked(tmp_path):  # what kill -9 left behind strands nobody
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_its_file_names_the_holder(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(ValueError) as error, locked(tmp_path / "run"):
            pass
        assert re.fullmatch(
            rf"{tmp_path}/run is in use by process {os.getpid()} on \S+ \(since [-\d]{{10}} [:\d]{{8}} [+-]\d{{4}}\); "
            "wait until it has ended, or give another --out.",
            str(error.value),
        )
        (tmp_path / "run" / "kept").touch()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["kept"], "the refused one did not take the lock's file away"


def test_a_folder_in_which_nothing_was_written_goes_again(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "runs" / "first"):
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir(), "an empty folder of the user's own stays"


def test_the_holder_ends_between_the_opening_and_the_locking(tmp_path, monkeypatch):
    """The file that was opened is then no longer in the folder; a lock on it would exclude nobody."""
    flock, calls = fcntl.flock, []

    def late(handle, operation):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2 and os.path.samestat(os.fstat(calls[-1]), (tmp_path / LOCK).stat())


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def none(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(trace, "_printed", set())
    with locked(tmp_path):
        pass
    assert capsys.readouterr().err == message("files:a_file_system_without_lo", tmp_path, os.strerror(errno.ENOLCK))


def save_model(folder, **options):
    save_hf(Decoder(PRESETS["tiny"], device="cpu"), folder, **options)


def save_tokenizer(folder, **options):
    train_tokenizer(["some text"], 270).save(folder, **options)


def save_adapter(folder, **options):
    model = Decoder(PRESETS["tiny"], device="cpu")
    lora.add(model, rank=2)
    lora.save(model, folder, **options)


def save_report(folder, **options):
    write_reports(folder, Verdict("a.py", {}, None, {}, None, [], None, [], [], {}, {}, None), **options)


FOREIGN = [
    (save_model, "config.json"), (save_model, "model.safetensors"), (save_model, "model-00001-of-00002.safetensors"),
    (save_tokenizer, "tokenizer.json"), (save_tokenizer, "chat_template.jinja"), (save_adapter, "adapter_model.safetensors"),
    (save_report, "doctor.html"), (save_report, "doctor.json"), (save_report, "doctor.sarif"),
]  # fmt: skip


@pytest.mark.parametrize("save, name", FOREIGN, ids=[name for _, name in FOREIGN])
def test_a_saver_replaces_no_file_of_another_origin(tmp_path, save, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=name):
        save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "{}"
    if save is not save_report:
        save(tmp_path, overwrite=True)
        assert not (tmp_path / name).exists() or (tmp_path / name).read_bytes() != b"{}"


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(DataError, match="run: is a file, wanted a folder"), locked(tmp_path / "run"):
        pass
