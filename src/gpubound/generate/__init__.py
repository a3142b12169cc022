"""Generate texts with a saved model, for `gpubound generate`.

options.py    options and their checks, prompts, and the files of a model: a folder, a name on the hub, a run
load.py       the model of such files on its devices, and its tokenizer
batches.py    generate batch by batch, with a decoder or a masked-diffusion sampler
chat.py       a conversation; a reply's reasoning
replicas.py   distribute batches over processes with replicas; lines of JSON in the order of the prompts
speed.py      tokens per second, and the fraction of the roofline
"""

from .options import Generate as Generate
