"""gpubound."""
