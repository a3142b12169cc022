"""Rewards of your own: functions from answers to numbers, called for the answers to one prompt."""

import re


def number_alone(completions: list[str], **columns: object) -> list[float]:
    """1 for an answer that is a number and nothing else."""
    return [float(re.fullmatch(r"-?\d+", text.strip()) is not None) for text in completions]


def closeness(completions: list[str], answer: list[int], **columns: object) -> list[float]:
    """1 for the right number, 1/2 for one beside it, less the farther it is: answers that are all wrong still differ."""
    numbers = [re.findall(r"-?\d+", text) for text in completions]
    return [1 / (1 + abs(int(found[-1]) - right)) if found else 0.0 for found, right in zip(numbers, answer)]
