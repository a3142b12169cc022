"""Patches for findings, byte for byte the same outside the lines they change.

`repair(targets)` chooses them and makes a diff. `PATCHES` lists them; a new one is a file here and its name there.
"""
