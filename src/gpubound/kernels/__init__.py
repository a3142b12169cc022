"""The doors: every fast op of the library as a plain function. A door checks its arguments, chooses (choose.py) and calls.

reference/ is the definition of each op, triton/ the fast form; tests/test_mirror.py keeps their names and signatures the same.
"""

from .norms import add_rms_norm as add_rms_norm
from .norms import rms_norm as rms_norm
