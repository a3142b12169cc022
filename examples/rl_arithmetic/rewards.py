"""A reward of your own: a function from answers to numbers, called for the answers to one prompt."""

import re


def number_alone(completions: list[str], **columns: object) -> list[float]:
    """1 for an answer that is a number and nothing else."""
    return [float(re.fullmatch(r"-?\d+", text.strip()) is not None) for text in completions]
