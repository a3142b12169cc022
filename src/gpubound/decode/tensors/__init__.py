"""A dense model whose every layer is sliced over several devices of one process, for few rows: all work on each token."""
