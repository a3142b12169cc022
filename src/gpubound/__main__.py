"""`python -m gpubound` is the command `gpubound`."""

import sys

from .cli import main

sys.exit(main())
