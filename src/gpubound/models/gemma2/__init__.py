"""Gemma 2: norms before and after each part of a block, capped scores and logits, windows in every other layer."""
