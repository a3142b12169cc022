"""CUDA graphs with a certificate: `capture` puts a function into a graph, compares replays with eager, and checks each call.

captured.py    the public function and what it returns
recording.py   the way from a function to a graph: watched warm-up calls, capture, restored state
reachable.py   the tensors and objects that the function can reach, each with a name and an access path
discover.py    the tensors that it reads and writes, found by watching its eager calls; operations that no graph can hold
memory.py      copies of storages, restored bit for bit; fingerprints; the comparison of results
runner.py      the CUDA graph, or eager calls where there is no GPU; NaN in memory that must not be read; lent memory
guards.py      static inputs, and the conditions that are checked at every call
certify.py     the certificate: replays compared with eager on other inputs and seeds, and the cause of a difference
audit.py       the operations of a step that no graph can hold, listed for the doctor
"""

from .captured import Captured as Captured, capture as capture
from .certify import Certificate as Certificate
