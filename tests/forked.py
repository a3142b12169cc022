"""A Python for tests that starts in 0.1 s of CPU instead of 4 to 7: its programs are forked from one that has imported all.

`python()` is the path of an executable that takes what `sys.executable` takes: `-u`, `-W`, then `-m`, `-c` or a script.
A program has its own process, session, arguments, environment, folder and files; signals reach it, and its exit code
comes back.
What it does not show is Python's own start and end, and what an import does. Tests of those take `sys.executable`.
"""

import ast
import atexit
import fcntl
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

MAIN = multiprocessing.process.current_process()  # of the server, which imports this before it forks

# What `python()` runs: it hands its own files to the server, and waits. Without site packages, 20 ms.
CLIENT = """#!{python} -IS
import os, signal, socket, sys
if sys.argv[1] in ("-I", "-P"):  # a sandbox, which has to be empty
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = [0, 1, 2, *(number for number in range(3, 256) if os.path.exists(f"/proc/self/fd/{{number}}"))]
there = socket.socket(socket.AF_UNIX)
there.connect({address!r})
said = repr((sys.argv[1:], dict(os.environ), os.getcwd(), files)).encode()
socket.send_fds(there, [len(said).to_bytes(8, "big")], files)
there.sendall(said)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: there.send(bytes([number])))
code = int(there.recv(16))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def python() -> str:
    """The path of the executable; this Python's where there is a GPU, which what is imported may ask for (such a process
    cannot be forked), and where processes have no handles (not Linux). Workers of one suite share a server."""
    import torch

    if torch.cuda.is_available() or not hasattr(os, "pidfd_open"):
        return sys.executable
    return os.environ.get("FORKED_PYTHON") or served("tests.distributed.preload")


def served(preload: str, *arguments: str) -> str:
    """The path of an executable whose programs are forked from a server that has imported this module. It does so when the
    first of them is started, with these arguments in `sys.argv`, and callers wait."""
    folder = Path(tempfile.mkdtemp(prefix="forked"))
    client, address = folder / "python", str(folder / "server")
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        command = f"import sys; sys.path[:] = {sys.path}; from tests.forked import serve; serve({number}, {preload!r})"
        words = [sys.executable, "-c", command, *arguments]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[number])
    atexit.register(server.communicate)  # it ends with the pipe, and takes the folder with it
    return str(client)


def serve(number: int, preload: str) -> None:
    """Fork a program for each connection to this socket, until the standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who mind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the tests, which then close the pipe
    with socket.socket(fileno=number) as listener:
        address = Path(listener.getsockname())
        while listener in select.select([listener, 0], [], [])[0]:
            if preload not in sys.modules:
                import_module(preload)
                sys.path.insert(0, "")  # as of `python -m` and `python -c`
            caller, _ = listener.accept()
            if not os.fork():
                listener.close()
                _mind(caller)
            caller.close()
    for path in (address, address.with_name("python")):
        path.unlink()
    address.parent.rmdir()
    os._exit(0)  # without the word of Triton's bindings about what they leave


def _mind(caller: socket.socket) -> None:
    """Start what the caller asks for, pass signals on, and say how it ended. A caller that was killed takes it along."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(caller, 8, 253)
    with caller.makefile("rb") as stream:
        arguments, environment, folder, numbers = ast.literal_eval(stream.read(int.from_bytes(size, "big")).decode())
    program = os.fork()
    if not program:
        caller.close()
        _begin(dict(zip(numbers, files)), environment, folder)
        _run(arguments)
    for file in (*files, 0, 1, 2):
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, caller], [], [])[0]):
        assert caller in ready
        numbers = caller.recv(16) or bytes([signal.SIGKILL])
        for number in numbers:
            os.kill(program, number)
        if signal.SIGKILL in numbers:
            break
    _, status = os.waitpid(program, 0)
    caller.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _begin(files: dict[int, int], environment: dict[str, str], folder: str) -> None:
    """The caller's files, environment and folder become this process's."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.process._current_process = MAIN  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    apart = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 256) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in apart.items():  # what the server has under these numbers is closed
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("FORKED", sys.executable)  # for the processes of a program, if it asks for that
    os.chdir(folder)
    more = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in more if path and path not in sys.path]
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _run(arguments: list[str]) -> None:
    """As Python runs a program, to its end."""
    code: object = 0
    try:
        _execute(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _execute(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-u":
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        kind, *rest = rest
    if kind == "-B":  # the modules are compiled
        kind, *rest = rest
    if kind == "-W":
        warnings._processoptions(rest[:1])  # type: ignore[attr-defined]
        kind, *rest = rest[1:]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")
