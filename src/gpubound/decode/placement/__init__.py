"""Decoders over several devices: stages of layers, or slices of every layer."""
