"""Folders of models that are quantised already, read into the formats of layers/quantized_base.py.

A scheme (scheme.py) names the quantised layers of a folder and reads one of them at a time: its codes and scales are
rearranged, and none of its numbers is rounded again. A weight that no format can hold is dequantised, as a counted fallback.
choose.py finds the scheme of a folder, and fill.py fills a model.

fp8.py          compressed-tensors and fine-grained FP8: a scale a weight, a row or a block
int4.py         GPTQ, AWQ, and integers of compressed-tensors
bitsandbytes.py NF4 and FP4, with and without double quantisation; int8
mxfp4.py        experts of gpt-oss
experts.py      modules of experts over fp4 codes
gguf.py         a GGUF file: its header, config and block formats
"""
