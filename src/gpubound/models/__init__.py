"""Models by family, a folder each: what placing, decoding, saving and training need to know of it."""

from .llama import PRESETS as PRESETS
from .llama import Decoder as Decoder
from .llama import DecoderConfig as DecoderConfig
from .llama import load_hf as load_hf
from .llama import save_hf as save_hf
