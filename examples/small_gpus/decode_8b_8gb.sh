#!/usr/bin/env bash
# Texts of an 8B model (Llama 3's shape) in int4 within 8 GB: the 16-bit weights stay in host memory (16 GB), and are rounded on the
# way to the GPU, a part at a time.
gpubound generate path/to/llama-8b --weights int4 --memory "8 GB" --max-length 2048 --prompt "Once"
