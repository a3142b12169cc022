"""DeepSeek-V4: transformers' model, whose weights are read in place."""
