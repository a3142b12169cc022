"""What the doctor found, for a person and for programs: a screen, a page, SARIF."""

from .files import check_reports as check_reports, write_reports as write_reports
from .terminal import brief as brief, screen as screen
