"""The kernels of the Richards family's ops."""
