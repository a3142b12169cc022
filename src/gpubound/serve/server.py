"""The calls of `Policies` over HTTP: POST /CALL with a JSON object of its arguments.

Threads read requests and write answers. The calls go through one queue to the thread that runs `serve`, in the order of their
arrival, because there is one GPU.
"""

import hmac
import inspect
import json
import math
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from ..errors import GpuboundError
from ..files import check_creatable
from ..formatting import counted, hint, readable, shown
from ..trace import say
from ..train.loop import Stop
from .client import PORT, check_address, names_this_machine
from .policies import Policies

CALLS = ("create", "forward_backward", "optim_step", "sample", "save_state", "load_state", "status")
FOLDERS = ("save_state", "load_state")
MOST_BYTES = 64 << 20  # of a request
LONGEST_NAME = 200  # bytes of a folder's name: file systems take 255, and a temporary one is longer
MOST_DIGITS = 18  # of a Content-Length
MOST_WAITING = 64  # requests
PATIENCE = 60.0  # seconds in which a client sends its request
REFUSED = (GpuboundError, ValueError, TypeError)


class QueuedCall(NamedTuple):
    call: Callable[[], Any]
    answer: "Future[Any]"


class Server:
    """A service of `policies`. `serve` answers until Ctrl-C; `address` is where.

    host, port  port 0 takes a free one. Any address but this machine's own needs a token; without one, only requests whose Host
                header names this machine are answered
    token       that each request must have as `Authorization: Bearer TOKEN`
    folder      where save_state and load_state find their folders
    most_bytes  the largest request
    """

    def __init__(
        self,
        policies: Policies,
        host: str = "127.0.0.1",
        port: int = PORT,
        token: str | None = None,
        folder: str | Path = "policies",
        most_bytes: int = MOST_BYTES,
    ):
        check_address(host, port, token)
        check_creatable(Path(folder), "serve: folder")
        self.policies, self.host, self.token, self.folder, self.most_bytes = policies, host, token, Path(folder), most_bytes
        self._jobs: SimpleQueue[QueuedCall] = SimpleQueue()
        self._ending = threading.Event()
        handler = type("Handler", (Handler,), {"service": self})
        try:
            self._http = (SixHTTPServer if ":" in host else HTTPServer)((host, port), handler)
        except OSError as error:
            raise ValueError(
                f"serve: {host}, port {port}: {error.strerror or error}; give another --port or --host."
            ) from error
        self._http.daemon_threads = True

    @property
    def address(self) -> str:
        host, port = self._http.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def serve(self) -> None:
        """Answer requests until Ctrl-C or `stop`: the call that runs is finished, those that wait are refused."""
        reading = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)
        reading.start()
        try:
            with Stop() as stop:
                while not stop.asked and not self._ending.is_set():
                    try:
                        job = self._jobs.get(timeout=0.1)
                    except Empty:
                        continue
                    self._run(job)
        finally:
            self._ending.set()
            self._http.shutdown()
            while not self._jobs.empty():
                self._jobs.get().answer.cancel()
            self._http.server_close()
            reading.join(5)
        unsaved = [
            f"{name} ({counted(facts['unsaved'], 'update')})"
            for name, facts in self.policies.status().items()
            if facts["unsaved"]
        ]
        lost = f"not saved, and lost: {', '.join(unsaved)}" if unsaved else "every update is saved"
        say(f"serve: stopped; {lost}.")

    def stop(self) -> None:
        """Let `serve` return, as Ctrl-C does. For another thread."""
        self._ending.set()

    def _run(self, job: QueuedCall) -> None:
        if not job.answer.set_running_or_notify_cancel():
            return
        try:
            job.answer.set_result(job.call())
        except KeyboardInterrupt as error:
            job.answer.set_exception(RuntimeError("serve: the call was interrupted."))
            raise error
        except Exception as error:  # the client gets its sentence, and the service goes on
            job.answer.set_exception(error)

    def answer(self, call: str, arguments: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a request's answer. Waits for its turn."""
        try:
            run = self._checked(call, dict(arguments))
        except REFUSED as error:
            return 400, {"error": _sentence(error)}
        if self._ending.is_set():
            return 503, {"error": "serve: the service is stopping."}
        if self._jobs.qsize() >= MOST_WAITING:
            return 503, {"error": f"serve: {MOST_WAITING} requests wait already; call again later."}
        job = QueuedCall(run, Future())
        self._jobs.put(job)
        while True:
            try:
                return 200, {"result": _finite(job.answer.result(timeout=1.0))}
            except TimeoutError:
                if self._ending.is_set() and job.answer.cancel():  # it came as the queue was emptied
                    return 503, {"error": "serve: the service is stopping."}
            except CancelledError:
                return 503, {"error": "serve: the service is stopping."}
            except REFUSED as error:
                return 400, {"error": _sentence(error)}
            except torch.OutOfMemoryError:
                return 500, {
                    "error": f"{call}: out of memory on the GPU; send fewer or shorter examples, or serve smaller rows."
                }
            except Exception as error:
                say(f"serve: {call} failed: {type(error).__name__}: {_sentence(error)}")
                return 500, {"error": f"{call}: {type(error).__name__}: {_sentence(error)}"}

    def _checked(self, call: str, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return the call with its arguments; raise ValueError for names that it does not take."""
        if call not in CALLS:
            raise ValueError(f"there is no call {call!r}; {hint(call, CALLS, 'the calls are')}")
        method = getattr(self.policies, call)
        parameters = inspect.signature(method).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        if unknown := [name for name in arguments if name not in known and not open_ended]:
            raise ValueError(f"{call}: {unknown[0]!r} is unknown; {hint(unknown[0], known, 'it takes')}")
        if missing := [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in arguments]:
            raise ValueError(f"{call}: {missing[0]} is missing.")
        if call in FOLDERS:
            arguments["folder"] = self._inside(arguments["folder"])
        return lambda: method(**arguments)

    def _inside(self, name: Any) -> Path:
        """Return the folder of this name: a client reads and writes in the service's folder alone."""
        wrong = not isinstance(name, str) or not name or name.startswith(".") or bool({"/", "\\", "\0"} & set(name))
        if wrong or len(name.encode(errors="replace")) > LONGEST_NAME:
            raise ValueError(
                f"folder: got {shown(name)}, wanted a name without slashes, of at most {LONGEST_NAME} bytes, of a folder in "
                f"the service's {self.folder}."
            )
        return self.folder / name


class HTTPServer(ThreadingHTTPServer):
    request_queue_size = 2 * MOST_WAITING  # connections before they are accepted; with 5, of 80 clients 35 were reset


class SixHTTPServer(HTTPServer):
    address_family = socket.AF_INET6


class Handler(BaseHTTPRequestHandler):
    """One request. Everything that it refuses is answered with a sentence in JSON."""

    service: Server
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server_version, sys_version = "gpubound", ""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        names = self.headers.get_all("Host") or [""]
        if self.service.token or all(names_this_machine(name, self.service.host) for name in names):
            return True
        wanted = f"localhost or {self.service.host}, or a service with a token"
        self._refuse(403, f"serve: Host: got {shown(names[-1])}, wanted {wanted}.")
        return False

    def do_POST(self) -> None:
        service = self.service
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if service.token and not hmac.compare_digest(token.encode(), service.token.encode()):
            return self._refuse(401, "serve: the token is missing or wrong; send Authorization: Bearer TOKEN.")
        if self.headers.get_content_type() != "application/json":  # which a page in a browser cannot send here
            return self._refuse(415, "serve: wanted Content-Type: application/json.")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > MOST_DIGITS:
            return self._refuse(411, "serve: wanted a Content-Length.")
        if int(length) > service.most_bytes:
            size = readable(int(length))
            return self._refuse(413, f"serve: got {size}, wanted at most {readable(service.most_bytes)}; send fewer examples.")
        try:
            arguments = json.loads(self.rfile.read(int(length)))
        except OSError:  # the client has left
            self.close_connection = True
            return None
        except (ValueError, RecursionError) as error:
            return self._refuse(400, f"serve: the body is not JSON: {_sentence(error)}.")
        if not isinstance(arguments, dict):
            return self._refuse(
                400, f"serve: got a JSON {type(arguments).__name__}, wanted an object with the call's arguments."
            )
        self._send(*service.answer(self.path.strip("/"), arguments))

    def do_GET(self) -> None:
        self._refuse(405, f"serve: wanted POST, with a JSON object, to one of {', '.join(f'/{call}' for call in CALLS)}.")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what http.server itself cannot read, or a method that there is not."""
        self._refuse(code, f"serve: {message or code}; wanted POST, with a JSON object.")

    def _refuse(self, status: int, sentence: str) -> None:
        self.close_connection = True  # its body is not read
        self._send(status, {"error": sentence})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client has left
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON has not: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
