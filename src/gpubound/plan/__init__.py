"""Predict what a training step takes, before it runs and without a GPU: memory, bytes between GPUs and time.

step.py     StepConfig: a recipe as one way to run a step (micro-batch, recomputation, sharding)
memory.py   bytes of one GPU by part, with the activations that backward needs
time.py     seconds of a step by part, with the collectives of several GPUs
gpus.py     the rates that predictions are based on
propose.py  every way to run a step, the fastest that fits, and the text of a plan

benchmarks/check_plan.py compares the predictions with committed measurements: within 20 %.
"""

from .gpus import gpu_named as gpu_named
from .memory import phases as phases
from .propose import Proposal as Proposal, first_that_fits as first_that_fits, proposals as proposals
from .step import StepConfig as StepConfig, step_of as step_of
