"""Every op in plain torch: its definition, its CPU path, and what the kernels are tested against. At least fp32 inside."""
