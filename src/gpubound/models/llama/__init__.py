"""The Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM): our decoder of that shape, and its Hugging Face folders in and out."""

from .decoder import PRESETS as PRESETS, Decoder as Decoder, DecoderConfig as DecoderConfig
from .weights import load_hf as load_hf, save_hf as save_hf
