"""The kernels of DeepSeek-V4's ops."""
