"""Can a CUDA graph hold it? `ready` tries a function or model, and every module that its call passes through.

parts.py     the modules of one call, each with what it was given
audit.py     the call under the ledger, then a capture with a certificate of each part
readiness.py what was found: a table for a person, plain values for a program
targets.py   what a command line names, as things to audit
"""

from .audit import ready as ready
from .readiness import Readiness as Readiness
