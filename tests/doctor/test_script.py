"""A script run by the doctor sees what Python itself would give it, and what it leaves does not keep the process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from gpubound.doctor.record.script import Script, StopScript
from tests import forked
from tests.messages import message

TELLS = """
    import json, os, sys
    import neighbour
    def noted(count: int): pass
    facts = {
        "argv": sys.argv, "name": __name__, "path": sys.path[0], "main": sys.modules["__main__"].TAG, "package": __package__,
        "neighbour": neighbour.HERE, "file": __file__, "annotation": str(noted.__annotations__),
    }
    print(json.dumps(facts))
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


@pytest.mark.parametrize("module", [False, True])
def test_a_script_finds_the_same_world(tmp_path, monkeypatch, capsys, module):
    monkeypatch.chdir(tmp_path)
    inside = "from .sibling import NAME\n" if module else ""
    write(tmp_path / "pkg/__init__.py", "")
    write(tmp_path / "pkg/sibling.py", "NAME = 1")
    write(tmp_path / "neighbour.py", "HERE = 1")
    write(tmp_path / "pkg/neighbour.py", "HERE = 1")
    write(tmp_path / "pkg/tells.py", inside + "TAG = 7\n" + dedent(TELLS))
    target = ["-m", "pkg.tells"] if module else ["pkg/tells.py"]
    python = subprocess.run([sys.executable, *target, "--a", "b c"], capture_output=True, text=True, check=True)
    before = sys.argv, sys.path[:], sys.modules["__main__"]

    assert Script(target[-1], ("--a", "b c"), module).run()

    want, got = json.loads(python.stdout), json.loads(capsys.readouterr().out)
    if module:  # Python puts the file there; runpy does so, too
        assert got["argv"][0] == want["argv"][0]
    assert {k: v for k, v in got.items() if k != "package"} == {k: v for k, v in want.items() if k != "package"}
    assert (got["package"] or None) == (want["package"] or None)
    assert before == (sys.argv, sys.path, sys.modules["__main__"])
    for name in ("neighbour", "pkg", "pkg.sibling", "pkg.tells"):
        sys.modules.pop(name, None)


def test_children_by_spawn_import_the_script_and_meet_no_doctor(tmp_path, capfd):
    script = write(
        tmp_path / "parent.py",
        """
        import multiprocessing, sys

        def child(queue):
            queue.put([__name__, "gpubound" in sys.modules])

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(queue.get(timeout=60))
            process.join()
        """,
    )
    assert Script(str(script)).run()
    assert capfd.readouterr().out.strip() == "['__mp_main__', False]"


def test_it_stops_through_finally_but_not_through_except(tmp_path, capsys):
    script = write(
        tmp_path / "loop.py",
        """
        from gpubound.doctor.record.script import StopScript
        try:
            try:
                raise StopScript
            except Exception:
                print("caught")
        finally:
            print("closed")
        """,
    )
    assert not issubclass(StopScript, Exception)
    assert not Script(str(script)).run()
    assert capsys.readouterr().out == "closed\n"


def test_a_script_may_go_elsewhere_and_print_elsewhere(tmp_path, monkeypatch, capsys):
    """What is written and printed after it stands where it would have stood before it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    text = "import io, os, sys\nos.chdir('deep')\nsys.stdout = sys.stderr = io.StringIO()\nprint('private')"
    assert Script(str(write(tmp_path / "goes.py", text))).run()
    print("public")
    assert capsys.readouterr().out == "public\n" and Path.cwd() == tmp_path


@pytest.mark.slow
def test_it_stops_a_thread_without_a_word(tmp_path):
    text = """
        import threading
        from gpubound.doctor.record.script import StopScript
        def step(error):
            raise error
        for error in (StopScript, KeyError("told")):
            thread = threading.Thread(target=step, args=(error,))
            thread.start()
            thread.join()
    """
    script = write(tmp_path / "threads.py", text)
    run = f"from gpubound.doctor.record.script import Script; print(Script({str(script)!r}).run())"
    done = subprocess.run([forked.python(), "-c", run], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n" and "KeyError: 'told'" in done.stderr and "StopScript" not in done.stderr


LEAVES = """
    import multiprocessing, os, sys, threading
    if sys.argv[1] == "fork":
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
        child.start()
        child.join()
        print("child", child.exitcode)
    elif sys.argv[1] == "thread":
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()
    else:
        os._exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, code, said",
    [
        ("0", 0, "True\n"),
        ("fork", 0, "child 5\nTrue\n"),
        ("7", 1, "ValueError: leaves.py failed with code 7; fix it, and check that it runs without the doctor.\n"),
        ("thread", 2, "gpubound doctor: a thread of the script called os._exit(0); there is no verdict.\n"),
    ],
)
def test_a_script_that_leaves_at_once_leaves_a_verdict(tmp_path, how, code, said):
    script = write(tmp_path / "leaves.py", LEAVES)
    run = f"from gpubound.doctor.record.script import Script; print(Script({str(script)!r}, ({how!r},)).run())"
    done = subprocess.run([forked.python(), "-c", run], capture_output=True, text=True)
    assert done.returncode == code and (done.stderr if code else done.stdout).endswith(said)


FORKS = """
    import os, sys
    import torch
    weight = torch.nn.Parameter(torch.ones(1, device=torch.accelerator.current_accelerator()))
    optimizer = torch.optim.SGD([weight])
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    for ends in ("pass", "sys.exit()", "sys.exit('why')", "raise KeyError"):
        if not (child := os.fork()):
            exec(ends)
            break
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_a_forked_process_ends_by_its_own_code_and_leaves_the_verdict_to_its_parent(tmp_path):
    script = write(tmp_path / "s.py", FORKS)
    command = [forked.python(), "-m", "gpubound", "doctor", "--dry-run", "--keep-going", "-o", tmp_path / "out", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and re.findall(r"child (\d)", ran.stdout) == ["0", "0", "1", "1"]
    assert ran.stdout.count("doctor  s.py") == 1 and ran.stderr.count("running s.py") == 1
    assert "failed" not in ran.stderr and "no verdict" not in ran.stderr
    assert ran.stderr.count("KeyError\n") == 1 and ran.stderr.count("why\n") == 1


@pytest.mark.slow
def test_a_script_may_wrap_what_it_prints_to(tmp_path):
    """The wrapper owns the buffer: it would close stdout with itself."""
    script = write(tmp_path / "wraps.py", "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('first')")
    run = f"from gpubound.doctor.record.script import Script; Script({str(script)!r}).run(); print('second')"
    done = subprocess.run([forked.python(), "-c", run], capture_output=True, text=True, check=True)
    assert done.stdout == "first\nsecond\n"


def test_what_python_cannot_run_is_told_without_the_doctors_own_frames(tmp_path, capsys):
    with pytest.raises(ValueError, check=message("doctor/script:what_python_cannot_run_i")):
        Script(str(write(tmp_path / "broken.py", "def f(:"))).run()
    said = capsys.readouterr().err
    assert "SyntaxError" in said and "broken.py" in said and "script.py" not in said
    with pytest.raises(ValueError, check=message("doctor/script:what_python_cannot_run_i.2")):
        Script(str(tmp_path)).run()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text, code", [("raise SystemExit(7)", 7), ("import sys; sys.exit('no data')", 1), ("def f():\n    1 / 0\nf()", 1)]
)
def test_a_failing_script_is_a_sentence_with_its_code(tmp_path, capsys, text, code):
    script = write(tmp_path / "fails.py", text)
    sentence = f"fails.py failed with code {code}; fix it, and check that it runs without the doctor."
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Script(str(script)).run()
    said = capsys.readouterr().err
    if "1 / 0" in text:
        assert "ZeroDivisionError" in said and "fails.py" in said
        assert "runpy" not in said and "record/script.py" not in said
    if "no data" in text:
        assert said == "no data\n"


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")  # Python's own, beside its error
@pytest.mark.parametrize(
    ("where", "target", "advised"),
    [
        (".", "outer/inner/fails.py", "-m outer.inner.fails"),
        ("outer/inner", "fails.py", f"-m outer.inner.fails in {os.path.join('..', '..')}"),
        (".", "outer/inner", "-m outer.inner"),
        (".", "outer/inner/__main__.py", "-m outer.inner"),
        (".", "loose/fails.py", "-m loose.fails"),
    ],
)
def test_a_file_of_a_package_is_to_be_run_as_a_module(tmp_path, monkeypatch, capsys, where, target, advised):
    for file in ("outer/__init__.py", "outer/inner/__init__.py"):
        write(tmp_path / file, "")
    for file in ("outer/inner/fails.py", "outer/inner/__main__.py", "loose/fails.py"):
        write(tmp_path / file, "from .helper import help")
    monkeypatch.chdir(tmp_path / where)
    with pytest.raises(ValueError) as error:
        Script(target).run()
    assert str(error.value) == message("doctor/script:a_file_of_a_package_is_t", Path(target).name, advised)
    assert "attempted relative import" in capsys.readouterr().err


def test_what_ends_well_and_what_the_user_interrupts(tmp_path):
    assert Script(str(write(tmp_path / "ends.py", "raise SystemExit(0)"))).run()
    with pytest.raises(KeyboardInterrupt):
        Script(str(write(tmp_path / "interrupted.py", "raise KeyboardInterrupt"))).run()
    with pytest.raises(BrokenPipeError):
        Script(str(write(tmp_path / "piped.py", "raise BrokenPipeError"))).run()


def test_what_is_not_there_is_a_sentence(tmp_path):
    notebook = write(tmp_path / "train.ipynb", "{}")
    with pytest.raises(ValueError, check=message("doctor/script:what_is_not_there_is_a_s.2")):
        Script(str(notebook))
    with pytest.raises(ValueError, check=message("doctor/script:what_is_not_there_is_a_s.3")):
        Script("no_such_module_xyz", module=True).run()


LEFT = {
    "thread": "threading.Thread(target=threading.Event().wait, name='feeder').start()",
    "pool": "ThreadPoolExecutor(thread_name_prefix='feeder').submit(threading.Event().wait)",
    "process": "multiprocessing.get_context('fork').Process(target=threading.Event().wait, name='feeder').start()",
}
HEAD = """
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from gpubound.doctor.record.script import end_anyway
before = threading.enumerate()
"""


def ended(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([forked.python(), "-c", HEAD + text], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT)
def test_what_waits_for_ever_is_named_and_ended(what):
    done = ended(f"{LEFT[what]}\nend_anyway(3, before, patience=0.2)\nprint('verdict')\nsys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "verdict\n")
    first, last = done.stderr.splitlines()
    assert first.startswith("gpubound doctor: the script was stopped, and left feeder") and first.endswith("up to 0.2 s.")
    assert last.startswith("gpubound doctor: ended feeder") and last.endswith(", which waited for the script.")


@pytest.mark.slow
def test_what_ends_in_time_is_waited_for():
    work = "threading.Thread(target=lambda: (time.sleep(0.2), print('saved')), name='saver').start()"
    done = ended(f"{work}\nend_anyway(3, before)\nsys.exit(3)")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "saved\n", 1)
    assert ended("end_anyway(3, before)").stderr == ""
