"""Monitoring of a run: its log on disk, the live line during the run, and the report."""

from .live import LiveLine as LiveLine
from .report import write_report as write_report
from .tape import RunTape as RunTape, changed as changed
