"""The doctor: what made the GPU wait for its host, what it cost, and what to write instead."""
