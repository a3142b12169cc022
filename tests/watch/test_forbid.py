"""no_stall: raises at the very line, honours a reason given there, and minds its own thread only."""

import sys
import threading

import pytest
import torch

from gpubound.errors import StallError
from gpubound.watch import events, no_stall
from gpubound.watch.events import site_of
from gpubound.watch.guard import comment
from tests.messages import message, refusal

from .planted import PLANTS, Kit

KEEP = events.READ.remedy


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.name != "another_thread"], ids=lambda plant: plant.name)
def test_each_planted_stall_raises_at_its_line(plant, sim):
    kit = Kit(sim)
    with pytest.raises(StallError, match=rf"planted\.py:{plant.line} in \S+: `"), no_stall():
        plant.run(kit)


def test_the_sentence(sim, monkeypatch, request):
    monkeypatch.chdir(request.path.parent)
    x = torch.ones(3, device=sim)
    with pytest.raises(StallError) as error, no_stall():
        x.sum().item()
    line = error.traceback[0].lineno + 1
    assert str(error.value) == message("watch/forbid:the_sentence", line, KEEP)


def test_the_sentence_of_a_copy(sim, monkeypatch, request):
    monkeypatch.chdir(request.path.parent)
    x = torch.ones(3)
    with pytest.raises(StallError) as error, no_stall(message="the step must not stall"):
        x.to(sim)
    line = error.traceback[0].lineno + 1
    assert str(error.value) == message("watch/forbid:the_sentence_of_a_copy", line)


def test_what_does_not_stall_passes(sim):
    x, host = torch.ones(3, device=sim), torch.ones(3).pin_memory()
    with no_stall():
        host.to(sim, non_blocking=True)
        x.to("cpu", non_blocking=True)
        host.copy_(x, non_blocking=True)
        host.sum().item()
        torch.zeros(3, device=sim).add_(x)
        x[x > 0] = 0.0


def test_pageable_and_non_blocking_stalls_all_the_same(sim):
    x = torch.ones(3)
    with pytest.raises(StallError, match="pageable, non_blocking"), no_stall():
        x.to(sim, non_blocking=True)


def test_allowed_kinds(sim):
    x = torch.ones(3, device=sim)
    with no_stall(allow=("d2h", "sync")):
        x.cpu()
        x.sum().item()
        with pytest.raises(StallError):
            torch.ones(3).to(sim)


def test_a_comment_with_a_reason_allows_and_is_counted(sim):
    x = torch.ones(3, device=sim)
    with no_stall() as guard:
        for _ in range(2):
            x.sum().item()  # a comment; # gpubound: allow(sync) the loss is printed here
        torch.cat(
            [x, torch.ones(2).to(sim)]  # gpubound: allow(h2d, sync) a constant
        )
    assert sorted(guard.allowed.values()) == [1, 2]


@pytest.mark.parametrize(
    ("stall", "note"),
    [
        (lambda x: x.sum().item(), ""),
        (lambda x: x.sum().item(), "The comment there gives no reason."),  # gpubound: allow(sync)
        (lambda x: x.sum().item(), "The comment there allows h2d only."),  # gpubound: allow(h2d) not the right kind
        (
            lambda x: x.cpu(),  # gpubound: allow(d2g) misspelt
            "The comment there allows 'd2g', which is none of sync, h2d, d2h; did you mean d2h?",
        ),
        (lambda x: (x.sum().item(), "# gpubound: allow(sync) said in a string"), ""),
        (
            lambda x: x.to(
                """
                # gpubound: allow(d2h) said in a string of several lines
                """
                and "cpu"
            ),
            "",
        ),
    ],
)
def test_a_comment_that_does_not_allow(stall, note, sim):
    with pytest.raises(StallError) as error, no_stall():
        stall(torch.ones(3, device=sim))
    assert str(error.value).endswith(f"<why>`. {note}" if note else "<why>`.")


def test_backward_is_covered(sim):
    w = torch.ones(3, device=sim).requires_grad_()

    def hook(g):
        return g * g.sum().item()

    with no_stall():
        y = w * 2
        y.register_hook(hook)
        with pytest.raises(StallError, check=message("watch/forbid:backward_is_covered")):
            y.sum().backward()
    (w * 3).sum().backward()  # and the engine still works
    assert w.grad.tolist() == [3.0, 3.0, 3.0]


def test_a_backward_without_a_user_frame_names_the_forward_line(sim):
    w, mask = torch.ones(4, device=sim).requires_grad_(), torch.ones(4, dtype=torch.bool).to(sim)
    with no_stall():
        with no_stall(allow="sync"):
            y = (w * 2)[mask]
        with pytest.raises(StallError, check=message("watch/forbid:a_backward_without_a_use")):
            y.sum().backward()


def test_other_threads_go_on(sim):
    x, values = torch.ones(3, device=sim), []
    thread = threading.Thread(target=lambda: (torch.simgpu.synchronize(), values.append(x.sum().item())))
    with no_stall():
        thread.start()
        thread.join()
        with pytest.raises(StallError):
            x.sum().item()
    assert values == [3.0]


def test_the_innermost_guard_decides(sim):
    x = torch.ones(3, device=sim)
    with no_stall():
        with no_stall(allow="sync"):
            x.sum().item()
            torch.simgpu.synchronize()
        with pytest.raises(StallError):
            torch.simgpu.synchronize()
    with no_stall(allow="sync"), no_stall(), pytest.raises(StallError):
        x.sum().item()


def test_nested_guards_count_a_permitted_call_once(sim):
    with no_stall() as outer, no_stall() as inner:
        torch.simgpu.synchronize()  # gpubound: allow(sync) the end of the epoch
    assert (outer.allowed.total(), inner.allowed.total()) == (0, 1)


def test_as_a_decorator(sim):
    @no_stall(allow="d2h")
    def step(x):
        x.cpu()
        return x.sum().item()

    for _ in range(2):
        with pytest.raises(StallError, match="in step: `return"):
            step(torch.ones(3, device=sim))
    torch.ones(3, device=sim).sum().item()


def test_inference_mode_is_covered(sim):
    with torch.inference_mode(), no_stall():
        x = torch.ones(2, 3, device=sim)
        x.reshape(3, 2) @ x
        for stall in (lambda: x.sum().item(), lambda: x.cpu(), lambda: torch.ones(3).to(sim)):
            with pytest.raises(StallError):
                stall()


def test_nothing_is_left_behind(sim):
    before = torch.cuda.synchronize, torch._tensor_str._str
    with pytest.raises(StallError), no_stall():
        torch.ones(3, device=sim).sum().item()
    assert (torch.cuda.synchronize, torch._tensor_str._str) == before
    assert torch._C._len_torch_dispatch_stack() == 0


def step_by_step():
    pass


@pytest.mark.parametrize(
    ("allow", "sentence"),
    [
        (("d2h", "syncs"), "got 'syncs', wanted kinds among sync, h2d, d2h; did you mean sync?"),
        (None, "got None, wanted kinds among sync, h2d, d2h."),
        (step_by_step, "got step_by_step; as a decorator it has parentheses: @no_stall()."),
    ],
)
def test_unknown_kind(allow, sentence):
    assert refusal(ValueError, lambda: no_stall(allow=allow)) == f"no_stall: allow: {sentence}"


def test_a_class_is_not_decorated():
    """Its methods run after it was made: nothing in them would be forbidden."""
    with pytest.raises(ValueError, check=message("watch/forbid:a_class_is_not_decorated")):
        no_stall()(Kit)


def test_a_guard_is_left_on_its_own_thread(sim):
    said = []

    def leave():
        with pytest.raises(RuntimeError) as error:
            guard.__exit__(None, None, None)
        said.append(str(error.value))

    with no_stall() as guard:
        other = threading.Thread(target=leave)
        other.start()
        other.join()
        with pytest.raises(StallError):
            torch.ones(3, device=sim).sum().item()
    assert said == [message("watch/forbid:a_guard_is_left_on_its_o")]


def test_a_comment_inside_a_block_is_not_of_its_header():
    """To Python the next turn of a loop, and the end of a `with`, are the whole block."""
    sites = []

    class Seen:
        def __iter__(self):
            sites.append(site_of(sys._getframe(1)))
            return iter([1])

        def __enter__(self):
            sites.append(site_of(sys._getframe(1)))

        def __exit__(self, *error):
            sites.append(site_of(sys._getframe(1)))

    for _ in (
        Seen()
    ):  # fmt: skip
        pass  # gpubound: allow(sync) of this line alone
    with Seen():
        pass  # gpubound: allow(sync) of this line alone
    assert [site.end - site.line for site in sites] == [2, 0, 0]
    assert not any(comment(site, "sync")[0] for site in sites)


def test_a_generator_is_not_decorated():
    """Its body runs after the guard has ended: nothing in it would be forbidden."""

    async def step():
        pass

    def steps():
        yield

    for function in (step, steps):
        with pytest.raises(ValueError, check=message("watch/forbid:a_generator_is_not_decor", function.__name__)):
            no_stall()(function)
