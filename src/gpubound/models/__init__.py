"""Models made of the library's own parts, in Hugging Face's layout."""

from .decoder import PRESETS as PRESETS
from .decoder import Decoder as Decoder
from .decoder import DecoderConfig as DecoderConfig
from .weights import load_hf as load_hf
from .weights import save_hf as save_hf
