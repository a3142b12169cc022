"""Reports of a verdict: a screen, a page, JSON and SARIF."""

from .files import check_reports as check_reports, write_reports as write_reports
from .words import brief as brief, screen as screen
