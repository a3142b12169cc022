"""What a process that a test starts is given."""

import os


def plain_environment() -> dict[str, str]:
    """Ours without Triton's interpreter: the definitions run there, as on a machine of a user without a GPU."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
