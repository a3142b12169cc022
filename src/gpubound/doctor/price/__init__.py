"""Prices of stalls: the recorded steps are replayed without them."""
