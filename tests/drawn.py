"""What Hypothesis draws in several modules."""

from functools import partial

from hypothesis import strategies as st

# The characters of st.text(), all but surrogates. It finds them by asking the codec for each, 1.1 s in every process.
text = partial(st.text, st.characters(exclude_categories=["Cs"]))
