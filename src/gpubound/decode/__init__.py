"""Generation from the live weights: gpubound.decoder(model) -> FastDecoder."""

from .engine import FastDecoder as FastDecoder, decoder as decoder
from .result import Generation as Generation
from .speculate import Draft as Draft
