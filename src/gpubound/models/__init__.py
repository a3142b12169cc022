"""Models by family, a folder each: what placing, decoding, saving and training need to know of it."""

from .draft_head import DraftHead as DraftHead
from .llama import (
    PRESETS as PRESETS,
    Decoder as Decoder,
    DecoderConfig as DecoderConfig,
    load_hf as load_hf,
    save_hf as save_hf,
)
from .richards import RichardsConfig as RichardsConfig, RichardsDecoder as RichardsDecoder
