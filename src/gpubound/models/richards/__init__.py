"""The Richards family: a language model put together from named parts, and its folders in and out."""

from .blocks import DiffusionBlock as DiffusionBlock, TransformerBlock as TransformerBlock
from .config import RichardsConfig as RichardsConfig
from .model import RichardsDecoder as RichardsDecoder
from .weights import load_richards as load_richards, save_richards as save_richards
