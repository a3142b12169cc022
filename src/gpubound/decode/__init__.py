"""Generation from the live weights: gpubound.decoder(model) -> FastDecoder; MaskedSampler for masked diffusion models."""

from .engine import FastDecoder as FastDecoder, decoder as decoder
from .masked import MaskedSampler as MaskedSampler
from .result import Generation as Generation
from .speculate import Draft as Draft
