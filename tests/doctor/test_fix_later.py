"""Files that are written in another thread: which lines are taken, what is written, and what an error does."""

import threading

import pytest
import torch

from gpubound.doctor.fix.step import HELPER, NAME

from .test_fix import mended

SAVED = """\
import torch
from torchvision.utils import save_image

net.load_state_dict(torch.load("begin.pt"))
for epoch in range(3):
    for i, x in enumerate(data):
        step(x)
        if i % 100 == 0:
            save_image(x.detach(),  # here
                       "x.png", normalize=True)
    torch.save(net.state_dict(), "net%d.pt" % epoch)  # there
    torch.save(other.state_dict(), f"{epoch}.pt")
"""


def test_files_are_written_by_another_thread(tmp_path):
    """All of a block, and once for two findings of a line."""
    text, made = mended(tmp_path, SAVED, ("host_work", "# here"), ("d2h", "# here"), ("checkpoint", "# there"))
    assert {patch.name for patch in made.patches.values()} == {"later"} and len(made.patches) == 3 and made.equal
    wanted = SAVED
    for before, after in (
        ("utils import save_image\n", f"utils import save_image\n\n{HELPER}\n"),
        ("save_image(x.detach(),  # here", "write_later(save_image, x.detach(),  # here"),
        ('torch.save(net.state_dict(), "net%d', 'write_later(torch.save, net.state_dict(), "net%d'),
        ("torch.save(other", "write_later(torch.save, other"),
    ):
        assert SAVED.count(before) == 1
        wanted = wanted.replace(before, after)
    assert text == wanted


@pytest.mark.parametrize(
    "before, after, why",
    [
        (
            "    torch.save(net",
            "    best = torch.load('net1.pt')\n    torch.save(net",
            "line 11 may read what is written: load()",
        ),
        ("for epoch", "def best():\n    return open('x.png')\nfor epoch", "line 6 may read what is written: open()"),
        ("step(x)", "with torch.cuda.stream(side): step(x)", "the file uses streams or graphs"),
        ('"net%d.pt" % epoch', "file", "wanted torch.save(value, path)"),
        ("for epoch", "copy = 3\nfor epoch", "the name copy is taken in this file"),
    ],
    ids=["read in the loop", "read by a function", "a stream", "a file", "a name"],
)
def test_a_file_that_may_be_read_is_written_at_once(tmp_path, before, after, why):
    assert SAVED.count(before) == 1
    _, made = mended(tmp_path, SAVED.replace(before, after), ("checkpoint", "# there"))
    assert not made.patches and f"later: {why}" in next(iter(made.refused.values())), made.refused


def test_a_copy_is_written_and_an_error_is_raised_later():
    space: dict = {"torch": torch}
    exec(HELPER.replace("atexit.register", "end = "), space)
    go, wrote = threading.Event(), []

    def write(value, name, scale=1):
        assert go.wait(60) and threading.current_thread() is not threading.main_thread()
        if name == "full":
            raise OSError("the disk is full")
        wrote.append((name, value["w"].tolist() if isinstance(value, dict) else value.tolist(), scale))

    weight = torch.ones(2)
    space[NAME](write, {"w": weight}, "a")
    space[NAME](write, weight, "b", scale=2)
    space[NAME](write, weight, "full")
    weight.zero_()  # the next step
    go.set()
    with pytest.raises(OSError, match="full"):
        space["end"]()
    assert wrote == [("a", [1.0, 1.0], 1), ("b", [1.0, 1.0], 2)]
    with pytest.raises(OSError, match="full"):
        space[NAME](write, weight, "c")


def test_few_copies_are_kept_at_a_time():
    space: dict = {"torch": torch}
    exec(HELPER.replace("atexit.register", "end = "), space)
    go, wrote = threading.Event(), []

    def write(value, name):
        assert go.wait(60)
        wrote.append(name)

    for name in "abcd":
        space[NAME](write, torch.ones(2), name)
    fifth = threading.Thread(target=space[NAME], args=(write, torch.ones(2), "e"))
    fifth.start()
    fifth.join(0.1)
    assert fifth.is_alive(), "it waits until one is written"
    go.set()
    fifth.join()
    space["end"]()
    assert wrote == list("abcde")
