"""OLMo 2: norms behind the parts of a block, and over whole rows of q and k."""
