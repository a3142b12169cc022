"""What the doctor found, for a person and for programs: a screen, a page, SARIF, annotations, a trace."""
