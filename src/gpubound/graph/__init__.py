"""Graphs that cannot lie: `capture` puts a function into a CUDA graph, proves that replays do the same, and checks each call.

reach.py       what the function can reach, with names and the ways to it
discover.py    what it reads and writes, found by watching eager calls
operations.py  what an operation does to its arguments, what a graph cannot hold, and launches that no dispatcher sees
memory.py      copies of what it writes, put back bit for bit; the comparison of results
bounce.py      bytes between a GPU and host memory
fingerprint.py 64 bits that stand for a storage, where its copy would lie on the host
runner.py      the CUDA graph, or eager calls where there is no GPU
prepare.py     the whole way from a function to a graph
rehearse.py    its eager calls before the capture
held.py        its static inputs, and what must be true at every call
certify.py     replays against eager on other inputs
calls.py       the two calls that are held against each other
cause.py       why they disagree
vary.py        what the certificate changes between its rounds; NaN where nothing should be read
captured.py    the public function and what it returns
"""

from .captured import Captured as Captured, capture as capture
from .certify import Certificate as Certificate
