"""Every op as Triton kernels, in files and functions named as in kernels/, with the definitions' signatures."""
