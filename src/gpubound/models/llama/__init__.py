"""Language model of the Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM), and its Hugging Face folders in and out."""

from .checkpoint import load_hf as load_hf, save_hf as save_hf
from .decoder import PRESETS as PRESETS, Decoder as Decoder, DecoderConfig as DecoderConfig
