"""What the library says goes to the logger "gpubound", in the library's own look until somebody configures logging."""

import io
import logging
import runpy
import subprocess

import pytest
from _pytest.logging import LogCaptureHandler, catching_logs

from gpubound import trace
from tests import forked
from tests.messages import message


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())
    monkeypatch.setattr(trace, "fallbacks", type(trace.fallbacks)())


@pytest.fixture
def handler():
    """One of the user's, with what it wrote as `.text()`."""
    made = logging.StreamHandler(io.StringIO())
    made.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    made.text = made.stream.getvalue
    yield made
    for logger in (trace.logger, logging.root):
        logger.removeHandler(made)
        logger.setLevel(logging.NOTSET if logger is trace.logger else logging.WARNING)


def say():
    trace.notice("100 % resident")
    trace.fallback("rms_norm", "no Triton")


def test_by_default_it_is_printed_once(capsys):
    say()
    say()
    assert capsys.readouterr().err == message("trace:by_default_it_is_printed")
    assert trace.fallbacks["rms_norm", "no Triton"] == 2


@pytest.mark.slow
def test_a_process_that_configured_nothing():
    """Without pytest, and with a warning: logging itself would print that one, too."""
    code = "from gpubound import trace; trace.notice('one'); trace.fallback('two', 'three')"
    done = subprocess.run([forked.python(), "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "gpubound: one\ngpubound: fallback: two: three\n")


@pytest.mark.parametrize("logger", [trace.logger, logging.root], ids=["gpubound", "root"])
def test_a_handler_of_the_user_gets_it_instead(handler, logger, capsys):
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    say()
    assert handler.text() == message("trace:a_handler_of_the_user_ge")
    assert capsys.readouterr().err == "" and not trace.prints()


def test_logging_s_own_default_level_shows_warnings(handler, capsys):
    logging.root.addHandler(handler)
    say()
    assert handler.text() == message("trace:logging_s_own_default_le") and capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "shown"), [(logging.WARNING, ["fallback: rms_norm: no Triton"]), (logging.ERROR, [])])
def test_a_level_silences(handler, level, shown, capsys):
    trace.logger.setLevel(level)
    say()
    assert capsys.readouterr().err == "".join(f"gpubound: {line}\n" for line in shown)


def test_a_null_handler_and_a_general_disable_silence(handler, capsys):
    trace.logger.addHandler(silent := logging.NullHandler())
    trace.notice("one")
    trace.logger.removeHandler(silent)
    logging.disable(logging.INFO)
    trace.notice("two")
    logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


def test_pytest_sees_it(capsys):
    """With its own handler on the root logger, as the plugin that this suite runs without attaches it."""
    with catching_logs(LogCaptureHandler(), logging.INFO) as handler:
        say()
    found = [(record.levelname, record.getMessage(), record.filename) for record in handler.records]
    assert [row[:2] for row in found] == [("INFO", "100 % resident"), ("WARNING", "fallback: rms_norm: no Triton")]
    assert found[0][2] == "test_trace.py" and "gpubound: 100 % resident\n" in capsys.readouterr().err


def test_control_characters_are_shown_wherever_it_goes(handler, capsys):
    trace.logger.addHandler(handler)
    trace.fallback("a\x1b[2J", "b")
    assert handler.text() == "WARNING gpubound fallback: a\\x1b[2J: b\n"


def test_a_progress_line_is_a_message_too(handler, capsys):
    from gpubound.data.texts import Progress

    def work():
        with Progress("reading", True, 2_000) as report:
            report.show(1_000, "1 text")

    work()
    assert capsys.readouterr().err == message("trace:a_progress_line_is_a_mes")
    trace.logger.addHandler(handler)
    trace.logger.setLevel(logging.INFO)
    work()
    assert handler.text() == message("trace:a_progress_line_is_a_mes.2")
    trace.logger.setLevel(logging.WARNING)
    work()
    assert capsys.readouterr().err == "" and handler.text().count("reading") == 1


def test_the_seconds_of_nested_blocks(handler, capsys):
    def work():
        with trace.timed("all"), trace.timed("one part"):
            pass

    work()
    assert capsys.readouterr().err == ""
    trace.logger.addHandler(handler)
    trace.logger.setLevel(logging.DEBUG)
    work()
    with pytest.raises(ValueError), trace.timed("what fails"):
        raise ValueError
    lines = [line.removeprefix("DEBUG gpubound ").lstrip().partition(" s ")[2] for line in handler.text().splitlines()]
    assert lines == ["  one part", "all", "what fails"]


def test_an_environment_variable_sets_the_level(monkeypatch, handler):
    monkeypatch.setenv("GPUBOUND_DEBUG", "1")
    monkeypatch.setattr(trace.logger, "handlers", list(trace.logger.handlers))  # to which a second import adds one
    runpy.run_path(trace.__file__, {"FallbackError": RuntimeError}, "gpubound.trace_again")
    assert trace.logger.level == logging.DEBUG
