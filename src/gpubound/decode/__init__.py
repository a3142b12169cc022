"""Generation from the live weights: gpubound.decoder(model), and of diffusion models MaskedSampler and NoiseSampler."""

from .denoise import NoiseSampler as NoiseSampler
from .engine import FastDecoder as FastDecoder, decoder as decoder
from .masked import MaskedSampler as MaskedSampler
from .result import Generation as Generation
from .speculate import Draft as Draft
