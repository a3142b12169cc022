"""Batches of any shape: each arrives as it is, or the feed says why not."""

import numpy as np
import torch
from hypothesis import given, strategies as st

from gpubound.data import feed

from .test_corpus_fuzz import bounded, scalars, tried

leaves = scalars | st.builds(torch.ones, st.integers(0, 3)) | st.builds(np.ones, st.integers(0, 3)) | st.just(object())
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@bounded
@given(batches=st.lists(trees, max_size=3), mode=st.sampled_from(["auto", "resident", "ring", "direct"]))
def test_batches_of_any_shape(batches, mode):
    """Every batch arrives, in order and of its kind, or the feed says why not."""
    served = tried(lambda: list(feed(batches, device="cpu", mode=mode)))
    if served is not None:
        assert [type(batch) for batch in served] == [torch.Tensor if isinstance(b, np.ndarray) else type(b) for b in batches]
