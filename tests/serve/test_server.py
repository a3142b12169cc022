"""The service over HTTP: its client gets what the calls in Python return, in order, and a sentence for what it refuses."""

import http.client
import json
import socket
import struct
import threading
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

import gpubound as gb
from gpubound.serve import Client, Server
from gpubound.serve.policies import Policies
from gpubound.serve.server import MOST_WAITING
from tests.messages import message, refusal

from .conftest import FIRST, SECOND, policies


@contextmanager
def serving(found, tmp_path, **options):
    server = Server(found, port=0, folder=tmp_path / "policies", **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def post(server, path, body, **headers):
    host, port = server.address.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
        with connection.getresponse() as answer:
            return answer.status, json.load(answer)


@pytest.mark.slow
def test_a_client_gets_what_python_gets(tmp_path):
    here = policies("first", "second")
    with serving(policies(), tmp_path) as server:
        client = Client(server.address, timeout=60)
        client.create("first", rank=4, lr=1e-2, seed=len("first"))
        client.create("second", rank=2, lr=1e-2, seed=len("second"))
        for name, examples in (("first", FIRST), ("second", SECOND), ("first", SECOND)):
            assert client.forward_backward(name, examples) == here.forward_backward(name, examples)
            assert client.optim_step(name, lr=2e-2) == here.optim_step(name, lr=2e-2)
        asked = ["first", "second", None], [[1, 2, 3]] * 3
        assert client.sample(*asked, n=2, max_new_tokens=4, seed=5) == here.sample(*asked, n=2, max_new_tokens=4, seed=5)
        assert client.save_state("first", "one") == {"name": "first", "updates": 2}
        assert client.load_state("third", "one")["updates"] == 2
        assert client.status() == here.status() | {
            "first": here.status()["first"] | {"unsaved": 0}, "third": here.status()["first"] | {"unsaved": 0}
        }  # fmt: skip
    model = policies().model
    gb.lora.load(model, tmp_path / "policies" / "one")
    pairs = zip(gb.lora.parameters(model), gb.lora.parameters(here.model, "first"))
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


class Echo(Policies):
    """Answers calls without a model."""

    def __init__(self):
        self.order, self.go = [], threading.Event()

    def create(self, name: str, value: object = None):
        self.order.append(name)
        self.go.wait(30)
        if isinstance(value, str):
            raise {"value": ValueError, "memory": torch.OutOfMemoryError, "defect": KeyError}[value](f"the {value} of {name}")
        return {"value": float("nan") if value is None else value}

    def save_state(self, name: str, folder: object, overwrite: bool = False):
        return {"folder": str(folder)}

    def status(self):
        return {"one": {"unsaved": 3}, "two": {"unsaved": 0}}


@pytest.fixture
def echo():
    found = Echo()
    found.go.set()
    return found


def test_errors_are_one_sentence_each(echo, tmp_path, capsys):
    with serving(echo, tmp_path, most_bytes=200) as server:
        found = [
            post(server, "/create", body)
            for body in ('{"name": "a"', "[1]", "{}", '{"name": "a", "nmae": 1}', '{"name": "a", "value": "value"}',
                         '{"name": "a", "value": "memory"}', '{"name": "a", "value": "defect"}', " " * 201)
        ]  # fmt: skip
        found += [post(server, "/creat", "{}"), post(server, "/_policies", "{}"), post(server, "/close", "{}")]
        found.append(post(server, "/create", "{}", **{"Content-Type": "text/plain"}))
        assert [status for status, _ in found] == [400, 400, 400, 400, 400, 500, 500, 413, 400, 400, 400, 415]
        for _, body in found:
            assert body.keys() == {"error"} and "\n" not in body["error"] and "Traceback" not in body["error"]
        assert post(server, "/create", '{"name": "a"}') == (200, {"result": {"value": None}})  # JSON has no NaN
        client = Client(server.address)
        assert refusal(ValueError, lambda: client.create("a", value="value")) == "the value of a"
        assert "defect" in refusal(RuntimeError, lambda: client.create("a", value="defect"))
        address = server.address
    assert "one (3 updates)" in capsys.readouterr().err
    assert address in refusal(ConnectionError, lambda: Client(address).status())


def raw(server, data, reset=False):
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        with connection.makefile("rb") as file:
            return file.read()


def test_what_http_does_not_allow_is_refused_in_json(echo, tmp_path, capsys):
    head = b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with serving(echo, tmp_path) as server:
        requests = [
            b"nonsense\r\n\r\n",
            b"PUT /status HTTP/1.1\r\nHost: [::1]:1\r\n\r\n",
            b"POST / HTTP/1.1\r\nX: " + b"x" * 70000,
        ]
        for request in (*requests, head + b"9" * 5000 + b"\r\n\r\n"):
            *_, body = raw(server, request).split(b"\r\n")
            assert json.loads(body).keys() == {"error"}
        raw(server, head + b"100\r\n\r\n{", reset=True)
        assert post(server, "/status", "{}")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_client_names_what_it_cannot_send_and_who_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = Client(f"http://127.0.0.1:{other.getsockname()[1]}", timeout=30)
        assert "create" in refusal(ValueError, lambda: client.create("a", lr=torch.ones(())))
        for answer in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"):
            thread = threading.Thread(target=answer_once, args=(other, answer))
            thread.start()
            assert client.url in refusal(ConnectionError, client.status)
            thread.join(30)


def answer_once(listening, answer):
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(answer)


def test_requests_are_answered_in_order_and_those_that_wait_at_the_end_are_refused(tmp_path):
    slow = Echo()
    answers = {}

    def ask(server, name):
        answers[name] = post(server, "/create", json.dumps({"name": name, "value": 1}))

    with serving(slow, tmp_path) as server:
        threads = []
        for name in ("first", "second", "third"):
            threads.append(threading.Thread(target=ask, args=(server, name)))
            threads[-1].start()
            while not (slow.order if name == "first" else server._jobs.qsize() == len(threads) - 1):
                threads[-1].join(0.001)
        server.stop()
        slow.go.set()
        for thread in threads:
            thread.join(30)
    assert slow.order == ["first"] and answers["first"] == (200, {"result": {"value": 1}})
    assert {answers[name][0] for name in ("second", "third")} == {503}


def test_as_many_clients_connect_at_once_as_may_wait(echo, tmp_path):
    """Before any of them is accepted: those beyond 5 were reset."""
    server = Server(echo, port=0, folder=tmp_path)
    host, port = server.address.removeprefix("http://").split(":")
    with ExitStack() as clients:
        clients.callback(server._http.server_close)
        for _ in range(MOST_WAITING + 1):
            clients.enter_context(socket.create_connection((host, int(port)), timeout=5))


def test_a_token_is_asked_for(echo, tmp_path):
    with serving(echo, tmp_path, token="sesame") as server:
        assert post(server, "/status", "{}")[0] == post(server, "/status", "{}", Authorization="Bearer sesam")[0] == 401
        assert Client(server.address, token="sesame").status() == echo.status()
        assert "token" in refusal(ValueError, Client(server.address, token="other").status)


def test_without_a_token_only_this_machines_names_are_answered(echo, tmp_path):
    """A page may have its name resolve to 127.0.0.1, and then sends any request as if it were the service's own page."""
    with serving(echo, tmp_path) as server:
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "127.1.2.3", "[::1]:8400"):
            assert post(server, "/status", "{}", Host=host)[0] == 200
        wrong = ("example.org", "example.org:8400", "127.0.0.1.example.org", "localhost.example.org", "0.0.0.0", "[", "")
        answers = [post(server, "/status", "{}", Host=host) for host in wrong]
        assert [status for status, _ in answers] == [403] * len(wrong)
        assert answers[0][1] == {"error": message("serve/server:without_a_token_only_this")}
        for head in (
            b"GET / HTTP/1.1\r\nHost: a.b",
            b"POST /status HTTP/1.0\r\nX: y",
            b"GET / HTTP/1.1\r\nHost: ::1\r\nHost: a.b",
        ):
            assert b" 403 " in raw(server, head + b"\r\n\r\n")
    with serving(echo, tmp_path, token="sesame") as server:
        assert post(server, "/status", "{}", Host="example.org", Authorization="Bearer sesame")[0] == 200


@pytest.mark.parametrize("token", ["süßes", "two\nlines"])
def test_a_token_that_no_header_can_have_is_refused_on_both_sides(token, echo):
    assert "ASCII" in refusal(ValueError, lambda: Server(echo, port=0, token=token))
    assert "ASCII" in refusal(ValueError, lambda: Client(token=token))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_an_address_that_others_reach_needs_a_token(host, echo):
    assert host in refusal(ValueError, lambda: Server(echo, host=host, port=0))


def test_a_port_in_use_is_one_sentence(echo, tmp_path):
    with serving(echo, tmp_path) as server:
        port = int(server.address.rpartition(":")[2])
        assert str(port) in refusal(ValueError, lambda: Server(echo, port=port))


@pytest.mark.parametrize("name", ["", ".", "..", "../one", "/etc", "a/b", "a\\b", "a\0", None, 3])
def test_a_client_writes_in_the_folder_of_the_service_alone(name, echo, tmp_path):
    with serving(echo, tmp_path) as server:
        client = Client(server.address)
        assert repr(name) in refusal(ValueError, lambda: client.save_state("a", name))
        assert "bytes" in refusal(ValueError, lambda: client.save_state("a", "é" * 101))
        assert client.save_state("a", "one") == {"folder": str(tmp_path / "policies" / "one")}


@pytest.mark.parametrize("port", [-1, 1 << 16, "8400", None])
def test_a_port_that_there_is_not(echo, port):
    assert repr(port) in refusal(ValueError, lambda: Server(echo, port=port))
