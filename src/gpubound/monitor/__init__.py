"""Watching a run: the tape it leaves on disk, the live line while it goes, the report afterwards.

Reads numbers, never models.
"""

from .live import LiveLine as LiveLine
from .report import write_report as write_report
from .tape import RunTape as RunTape
