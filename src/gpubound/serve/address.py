"""Check the address that a service listens at: other machines may reach it only with a token."""

from ipaddress import ip_address
from urllib.parse import urlsplit


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
