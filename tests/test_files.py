"""Files from outside: what is refused, and that each refusal names the file."""

import errno
import os
import socket

import pytest

from gpubound.errors import DataError
from gpubound.files import beside, read_json, reading, regular, write_whole, writing
from gpubound.models import PRESETS, Decoder, load_hf, save_hf


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
        assert refused(regular, plug) == f"{plug}: is a socket, wanted a regular file."
    assert refused(regular, pipe) == f"{pipe}: is a named pipe, wanted a regular file."
    assert refused(read_json, pipe) == f"{pipe}: is a named pipe, wanted a regular file."  # and not a hang
    assert refused(regular, folder) == f"{folder}: is a folder, wanted a regular file."
    assert "/dev/null: is a device" in refused(read_json, type(tmp_path)("/dev/null"))
    assert refused(regular, missing) == f"{missing}: cannot be read: No such file or directory; check the path."
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
    assert beside(listing, "a.gbt") == tmp_path / "a.gbt" and beside(listing, "..a") == tmp_path / "..a"
    for name in ("../a", "/etc/passwd", "b/a", "..", ".", "", "a/", "a\0b", 3, None, ["a"]):
        assert refused(beside, listing, name) == (
            f"{listing}: names the file {name!r}, wanted the name of a file in the same folder."
        )


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, '{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert read_json(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]


def fail(manager, path, number):
    with manager(path):
        raise OSError(number, os.strerror(number))


def test_what_the_system_says_gets_the_files_name(tmp_path):
    path = tmp_path / "shard"
    assert refused(fail, reading, path, errno.EIO).startswith(f"{path}: cannot be read: Input/output error; ")
    assert refused(fail, writing, path, errno.EFBIG).startswith(f"{path}: cannot be written: File too large; ")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'") as error:
        fail(writing, path, errno.ENOSPC)
    assert error.value.errno == errno.ENOSPC  # by which commands know a full disk


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
