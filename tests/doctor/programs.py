"""Random loops for the doctor's properties: a list of moves for a step, played any number of times."""

from hypothesis import strategies as st

from gpubound.doctor.price.simulator import PINNED

from .tapes import AUTOGRAD, MAIN, Synthetic

times = st.integers(1, 60).map(float)
streams = st.sampled_from([7, 20])
SIDE = [
    st.tuples(st.just("launch"), times, streams),
    st.tuples(st.just("copy"), times, streams),
    st.tuples(st.just("think"), times, st.just(0)),
    st.tuples(st.just("order"), times, streams),
    st.tuples(st.just("graph"), times, streams),
    st.tuples(st.just("backward"), times, st.just(0)),
]
STALLS = [
    st.tuples(st.just("sync"), times, st.sampled_from([7, 20, None])),
    st.tuples(st.just("free"), times, st.just(0)),
    st.tuples(st.just("pageable"), times, streams),
]
running = st.lists(st.one_of(SIDE), min_size=2, max_size=12)
stalling = st.lists(st.one_of(SIDE + STALLS), min_size=2, max_size=12)


def program(moves: list[tuple], steps: int, stalls: bool = True, launches: int = 3) -> Synthetic:
    """`stalls`: with its waits, or without them and without their calls; the works stay."""
    made = Synthetic()
    for _ in range(steps):
        made.think(5).launch(run=8, times=launches)
        for kind, us, stream in moves:
            if kind == "launch":
                made.launch(run=us, stream=stream)
            elif kind == "copy":
                made.copy(run=us, bytes=int(us * PINNED), stream=stream)
            elif kind == "think":
                made.think(us)
            elif kind == "graph":
                made.graph([us, 2.0, us], stream=stream)
            elif kind == "order":
                other = 27 - stream
                made.launch(run=us, stream=stream).record("e", stream).wait_event("e", other).launch(run=3, stream=other)
            elif kind == "backward":
                made.hand(AUTOGRAD).launch(run=us, thread=AUTOGRAD, times=2).hand(MAIN, of=AUTOGRAD)
            elif kind == "pageable":
                made.copy(run=us, bytes=int(us * PINNED), stream=stream, pageable=stalls)
            elif stalls and kind == "sync":
                made.sync(stream)
            elif stalls and kind == "free":
                made.stop("free", us)
        made.step()
    return made


def length(made: Synthetic) -> float:
    return max(event.end for event in (*made.calls, *made.work))
