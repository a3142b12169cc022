"""The body for any Hugging Face causal language model: its own forward over a static cache."""
