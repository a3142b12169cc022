"""Phi-3: q, k, v in one weight and gate, up in another; rotation of a part of each head."""
