"""Decoder of DeepSeek-V4: layers whose tokens attend to a window and to compressed entries of earlier tokens."""
