"""Chat with a saved model, in its chat template.

gpubound chat runs/first                      Ctrl-C ends a reply, Ctrl-D the conversation
echo hello | gpubound chat runs/first         a turn for each line of standard input
"""

from collections.abc import Sequence

from . import generate


def main(argv: Sequence[str]) -> int:
    return generate.main(argv, chat=True)
