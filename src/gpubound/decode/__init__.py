"""Generation from the live weights: gpubound.decoder(model), and of diffusion models MaskedSampler and NoiseSampler."""

from .denoise import NoiseSampler as NoiseSampler
from .generate import FastDecoder as FastDecoder, decoder as decoder
from .masked import MaskedSampler as MaskedSampler
from .result import Generation as Generation
from .speculation import Draft as Draft
