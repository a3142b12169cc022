"""CUDA graphs with a certificate: `capture` puts a function into a graph, compares replays with eager, and checks each call.

captured.py           the public function and what it returns
prepare.py            the steps from a function to a graph
reachable.py          the tensors and objects that the function can reach, each with a name and an access path
warm_up.py            its eager calls before the capture
discover.py           the tensors that it reads and writes, found by watching those calls
operations.py         the arguments that an operation writes, operations that no graph can hold, launches outside the dispatcher
memory.py             snapshots of what it writes, restored bit for bit; the comparison of results
staging_copy.py       copies between a GPU and pinned host memory
fingerprint.py        64-bit hashes of storages whose copies would be on the host
restored_bindings.py  attributes and names that a refused capture restores
runner.py             the CUDA graph, or eager calls where there is no GPU
guards.py             static inputs, and the conditions that are checked at every call
certify.py            the certificate: replays compared with eager on other inputs
calls.py              the eager call and the replay that are compared
cause.py              the reason for a difference
perturb.py            other inputs and seeds for each round of the certificate; NaN in memory that must not be read
audit.py              the operations of a step that no graph can hold, listed for the doctor
"""

from .captured import Captured as Captured, capture as capture
from .certify import Certificate as Certificate
