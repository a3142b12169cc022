"""A client of `gpubound serve`, and the check of the address that the service listens at.

Both import the standard library alone: copy this file to a machine without gpubound.
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

PORT = 8400
TOKEN = "GPUBOUND_TOKEN"  # the environment variable with the service's token


class Client:
    """The calls of `gpubound.serve.Policies` over HTTP.

    Each waits for its turn, and returns what the call in Python returns. Raises ValueError where the service refuses a call,
    RuntimeError where it failed, and ConnectionError where there is none.

    url      of the service
    token    of a service that asks for one; None: what the environment variable GPUBOUND_TOKEN holds
    timeout  seconds that a call may take, its turn included; None: any time
    """

    def __init__(self, url: str = f"http://127.0.0.1:{PORT}", token: str | None = None, timeout: float | None = None):
        self.url, self.token, self.timeout = url.rstrip("/"), token or os.environ.get(TOKEN), timeout
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("client: token: got characters that a header of HTTP cannot have, wanted printable ASCII.")

    def create(self, name: str, **options: Any) -> dict[str, Any]:
        """Create a policy: rank, alpha, targets, lr, betas, weight_decay, clip, seed."""
        return self._call("create", name=name, **options)

    def forward_backward(self, name: str, examples: list[Any], objective: str = "cross_entropy", **options: Any) -> Any:
        """Add the gradients of examples, dicts with prompt and answer, to those that the next `optim_step` takes."""
        return self._call("forward_backward", name=name, examples=examples, objective=objective, **options)

    def optim_step(self, name: str, lr: float | None = None) -> dict[str, Any]:
        """Update the policy's weights."""
        return self._call("optim_step", name=name, lr=lr)

    def sample(self, name: Any, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
        """Return sequences: n, max_new_tokens, temperature, seed, logprobs, stop, top_k, top_p, min_p, repetition_penalty."""
        return self._call("sample", name=name, prompts=prompts, **options)

    def save_state(self, name: str, folder: str, overwrite: bool = False) -> dict[str, Any]:
        """Write the policy and its optimizer's state into `folder` of the service's folder."""
        return self._call("save_state", name=name, folder=folder, overwrite=overwrite)

    def load_state(self, name: str, folder: str) -> dict[str, Any]:
        """Continue from what `save_state` wrote."""
        return self._call("load_state", name=name, folder=folder)

    def status(self) -> dict[str, Any]:
        """Return the policies: rank, updates, those that are not saved, examples that wait for an update."""
        return self._call("status")

    def _call(self, call: str, **arguments: Any) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            body = json.dumps(arguments).encode()
        except TypeError as error:
            raise ValueError(f"{call}: {error}; give Python's own numbers, lists and texts, such as tensor.tolist().") from None
        try:
            request = urllib.request.Request(f"{self.url}/{call}", body, headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = _error_of(error.read())
            raise (ValueError if error.code < 500 else RuntimeError)(text or f"{self.url}: {error}") from None
        except TimeoutError:
            raise TimeoutError(
                f"{call}: no answer from {self.url} in {self.timeout} s; the service still carries it out."
            ) from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"{self.url}: {error.reason}; start the service with gpubound serve.") from None
        except (http.client.HTTPException, ConnectionError) as error:
            raise ConnectionError(f"{self.url}: {error}; there was no answer to {call}.") from None
        try:
            return json.loads(answer)["result"]
        except (ValueError, KeyError, TypeError):
            raise ConnectionError(f"{self.url}: the answer is not one of gpubound serve; check the address.") from None


def _error_of(body: bytes) -> str | None:
    try:
        return json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None


def check_address(host: str, port: int, token: str | None) -> None:
    """Raise ValueError for a port or a token that cannot be, and for an address that other machines reach, without a token."""
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise ValueError(f"serve: port: got {port!r}, wanted 0 (any that is free) to 65535.")
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError(
            "serve: token: got characters that a header of HTTP cannot have, wanted printable ASCII; make another."
        )
    if not token and not is_loopback(host):
        raise ValueError(
            f"serve: host: got {host}, which other machines may reach, and no token; name a file with one by --token-file, or "
            f"set GPUBOUND_TOKEN."
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(header: str, host: str) -> bool:
    """Return whether a request's Host header names the loopback device or `host`.

    A page in a browser may have its own name resolve to 127.0.0.1, and its requests then have that name.

    >>> [names_this_machine(name, "127.0.0.1") for name in ("localhost:8400", "[::1]", "example.org", "")]
    [True, True, False, False]
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets without an address
        return False
    return name == host.lower() or is_loopback(name)
