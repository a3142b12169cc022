"""Run Python code that a model has written, in a separate process with limits of time, memory and file size.

The limits keep a run from being held up, and its machine from being filled. They are no wall against an attacker: the code may
read what this user may read, and reach the network where the machine does. Run models that you do not trust in a container.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, NamedTuple

FILE_BYTES = 1 << 20  # that the code may write to a file
SHOWN = 2000  # characters of the output that are kept

# Limits itself before it reads the code, so that nothing has to run between fork and exec of a process with many threads. It
# writes a token once the code has run to its end: code that calls exit(0) before its tests has not passed them. unittest.main
# calls exit after all tests.
CHILD = """
import os, resource, runpy, sys
seconds, memory, size, end, token, path = *map(int, sys.argv[1:5]), *sys.argv[5:]
for kind, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
sys.argv = [path]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as stop:
    at = stop.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    if stop.code or at.tb_frame.f_code.co_filename != getattr(sys.modules.get("unittest.main"), "__file__", ""):
        raise
os.write(end, token.encode())
"""


class SandboxResult(NamedTuple):
    passed: bool  # the code ran to its end, without an error
    why: str  # "", or the end of its errors, or the limit that it met
    output: str = ""  # the end of what it printed


def run_code(code: str, seconds: float = 5.0, memory: int = 512 << 20) -> SandboxResult:
    """Run `code` and return how it ended. Processes that it has started end with it."""
    with tempfile.TemporaryDirectory(prefix="gpubound-") as folder:
        path = Path(folder, "answer.py")
        path.write_text(code, encoding="utf-8", errors="replace")
        limits, token, (reads, writes) = [max(1, int(seconds + 1)), memory, FILE_BYTES], token_hex(16), os.pipe()
        os.set_blocking(reads, False)  # a process that has left the group may keep the other end open
        # Into files, whose size is limited: a pipe would take as much memory as the code prints.
        with open(Path(folder, "output"), "w+b") as output, open(Path(folder, "errors"), "w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", CHILD, *map(str, limits), str(writes), token, str(path)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, start_new_session=True, pass_fds=[writes],
                env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                why = f"it took more than {seconds:g} seconds"
            else:
                why = "" if process.returncode == 0 else _end(errors) or f"exit code {process.returncode}"
                if not why and _received(reads) != token:
                    why = "it called exit before its end"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                os.close(reads)
                os.close(writes)
            return SandboxResult(not why, why, _end(output))


def _received(pipe: int) -> str:
    with suppress(BlockingIOError):
        return os.read(pipe, 64).decode(errors="replace")
    return ""


def _end(file: BinaryIO) -> str:
    """Return the last SHOWN characters of a file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * SHOWN))
    return file.read().decode(errors="replace")[-SHOWN:].strip()
