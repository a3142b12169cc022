"""Packed rows, and the same examples one a row."""

import torch

IGNORED = -100


def examples(lengths, vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (length + 1,), generator=generator) for length in lengths]


def packed(rows, width, pieces=None):
    """Return a batch in the form of a corpus's packed rows: each row a list of examples, the rest padding. `pieces`: the most
    that a row may have, which sets the length of cu_seqlens."""
    pieces = pieces or max(map(len, rows)) + 1
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.int64),
        "labels": torch.full((len(rows), width), IGNORED),
        "position_ids": torch.zeros(len(rows), width, dtype=torch.int64),
        "segment_ids": torch.full((len(rows), width), -1),
    }
    starts = []
    for r, row in enumerate(rows):
        at = 0
        for number, tokens in enumerate(row):
            end = at + len(tokens) - 1
            batch["input_ids"][r, at:end], batch["labels"][r, at:end] = tokens[:-1], tokens[1:]
            batch["position_ids"][r, at:end] = torch.arange(end - at)
            batch["segment_ids"][r, at:end] = number
            starts.append(r * width + at)
            at = end
        if at < width:
            batch["position_ids"][r, at:] = torch.arange(width - at)
            starts.append(r * width + at)
    total = len(rows) * width
    starts += [total] * (len(rows) * pieces + 1 - len(starts))
    return batch | {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}


def padded(tokens, width):
    """Return a batch of one example a row, padded on the right."""
    batch = packed([[one] for one in tokens], width)
    return {name: batch[name] for name in ("input_ids", "labels")}


def spans(rows):
    """Return [(row, slice of the row)] of the examples."""
    found = []
    for r, row in enumerate(rows):
        at = 0
        for tokens in row:
            found.append((r, slice(at, at + len(tokens) - 1)))
            at += len(tokens) - 1
    return found
