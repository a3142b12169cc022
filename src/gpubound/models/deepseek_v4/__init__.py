"""DeepSeek-V4: transformers' own model, whose weights are read where they lie."""
