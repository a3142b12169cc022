"""README's picture of several GPUs: what all of them train together, beside one of them; and 8b in shards beside its peers.

Replicas are measured weakly: each GPU has as many rows as the single one. A bar is what all GPUs make together, and "1 GPU" is
the speed in the turns with the most of them.
"""

import re
from collections.abc import Iterator, Sequence

from .bars import Bar, contenders
from .gates import figure
from .results import Line
from .tables import is_peer

CASE = re.compile(r"(\S+) on (\d+)")
ONE = "one GPU"
REPLICAS = (("350m", "350M parameters, 16 x 1,024 tokens on each GPU"), ("1b", "1B parameters, 32 x 2,048 tokens on each GPU"))
SHARDS = ("8b", "8B parameters in shards, 4 x 4,096 tokens on each of")


def panels(lines: Sequence[Line]) -> list[tuple[str, list[Bar]]]:
    """What `lines`, the newest of one GPU, can fill."""
    found = [(f"Training, {title}, all GPUs together", bars) for name, title in REPLICAS if (bars := replicas(lines, name))]
    sharded = [(world, line) for world, line in measured(lines, SHARDS[0]) if is_peer(line)]
    if sharded:
        most = max(world for world, _ in sharded)
        beside = [line for world, line in sharded if world == most]
        found.append((f"Training, {SHARDS[1]} {most} GPUs, speed of each GPU", contenders(beside)))
    return found


def measured(lines: Sequence[Line], name: str) -> Iterator[tuple[int, Line]]:
    """How many GPUs trained a model, and the line that tells how fast."""
    for line in lines:
        case = CASE.fullmatch(line.case)
        if case is not None and line.bench == "ranks" and line.unit == "tok/s" and case[1] == name:
            yield int(case[2]), line


def replicas(lines: Sequence[Line], name: str) -> list[Bar]:
    by_world = {world: line for world, line in measured(lines, name) if line.peer_name == ONE}
    if not by_world:
        return []
    most = max(by_world)
    bars = [Bar("1 GPU", 1 / most / by_world[most].ratio, figure(by_world[most].peer, "tok/s"))]
    for world, line in sorted(by_world.items()):
        words = f"{figure(world * line.ours, 'tok/s')}  ({world * line.ratio:.2f} x one)"
        bars.append(Bar(f"{world} GPUs", world * line.ratio / most / by_world[most].ratio, words, ours=True))
    return bars
