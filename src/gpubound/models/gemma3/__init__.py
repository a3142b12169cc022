"""Gemma 3's text model: Gemma 2's blocks with normed heads, and angles of its own for layers with a window."""
