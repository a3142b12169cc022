"""HTML pages without external resources, in one style, light and dark. All text is escaped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from ..files import write_atomic as write_atomic
from ..formatting import PRINTABLE as PRINTABLE

TITLE_END = "gpubound</title>"  # in the head of every page of this library


def environment(package: str, **filters: Callable[..., Any]) -> Environment:
    """Return the environment of a package's templates, with `style.css`."""
    loader = ChoiceLoader([PackageLoader(package), PackageLoader("gpubound.pages")])
    # Not select_autoescape(), which does not escape templates named .j2.
    result = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    result.filters |= filters
    return result


def check_page(out: Path) -> None:
    """Raise ValueError if `out` cannot be a page, or is a file that gpubound did not write."""
    if not str(out).strip() or out.is_dir() or not out.parent.is_dir():
        why = "a folder" if out.is_dir() else "in a folder that does not exist"
        raise ValueError(f"out: {str(out)!r} is {why}; give a file such as report.html.")
    if out.is_file() and out.stat().st_size and TITLE_END not in out.read_bytes()[:4096].decode("utf-8", errors="replace"):
        raise ValueError(f"out: {out} exists and is not an HTML page of gpubound; give another file.")


def write_page(out: Path, page: str) -> None:
    """Write the page atomically, or directly into a special file such as /dev/stdout."""
    # A name may hold half a surrogate pair, or control characters, which a terminal that shows the file would obey.
    page = page.encode("utf-8", errors="replace").decode().translate(PRINTABLE)
    if out.exists() and not out.is_file():
        out.write_text(page, encoding="utf-8")
    else:
        write_atomic(out, page)
