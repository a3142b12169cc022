"""The Llama kind (Llama, Mistral, Qwen2, Qwen3, SmolLM): our decoder of that shape, and its Hugging Face folders in and out."""

from .decoder import PRESETS as PRESETS
from .decoder import Decoder as Decoder
from .decoder import DecoderConfig as DecoderConfig
from .weights import load_hf as load_hf
from .weights import save_hf as save_hf
