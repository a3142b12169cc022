"""The rules: what counts as a stall, from which number on, and what to write instead.

A rule is a function from measurements to candidates. A call of the profile belongs to the first rule that claims it, so the
more specific ones come first.
"""
