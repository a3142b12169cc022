"""Richards models: language models of named parts, and their folders in and out."""

from .checkpoint import load_richards as load_richards, save_richards as save_richards
from .model import (
    RichardsConfig as RichardsConfig,
    RichardsDecoder as RichardsDecoder,
    TransformerBlock as TransformerBlock,
)
