"""Runners of DeepSeek-V4, with the functions that decode/ calls for a family of models/registry.py's RUNNERS."""

from .body import CompressedBody as runner, kept_bytes, reader_for
from .sliced import compressed_slices as sliced_runner

__all__ = ["kept_bytes", "reader_for", "runner", "sliced_runner"]
