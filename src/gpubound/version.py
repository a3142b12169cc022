"""The version of gpubound."""

__version__ = "0.1.0"
