"""Mixtral and Qwen3-MoE: Llama's attention beside sparse layers, whose router gives a token to a few experts."""
