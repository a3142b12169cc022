"""Run a program in phases and read what they recorded: steps, tapes, lines."""
