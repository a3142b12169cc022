"""Generate texts with a saved model, for `gpubound generate`.

options.py    options and their checks, prompts, and the files of a model: a folder, a name on the hub, a run
batches.py    a saved model with its tokenizer; texts batch by batch, with a decoder or a masked-diffusion sampler; speed
chat.py       a conversation; a reply's reasoning
replicas.py   distribute batches over processes with replicas; lines of JSON in the order of the prompts
"""

from .options import Generate as Generate
