"""Folders of models that are quantised already, read into the formats of layers/quantized_base.py.

A scheme (scheme.py) names the quantised layers of a folder and reads one of them at a time: its codes and scales are
rearranged, and none of its numbers is rounded again. A weight that no format can hold is dequantised, as a counted fallback.

schemes.py      the schemes, and which one a folder has: FP8 of compressed-tensors and fine-grained FP8; GPTQ, AWQ and integers
                of compressed-tensors; NF4, FP4 and int8 of bitsandbytes; MXFP4 experts of gpt-oss
scheme.py       what a scheme is; models/storing.py fills a model
experts.py      modules of experts over fp4 codes
gguf.py         a GGUF file: its header, config and block formats
"""
