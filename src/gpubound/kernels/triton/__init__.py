"""Every op as Triton kernels: the same files, function names and signatures as reference/ (tests/test_mirror.py)."""
