"""Predict what a training step takes, before it runs and without a GPU: memory, bytes between GPUs and time.

step.py     StepConfig: a recipe as one way to run a step (micro-batch, recomputation, sharding), and the rates of GPUs
costs.py    bytes of one GPU and seconds of a step by part, with the collectives of several GPUs
propose.py  every way to run a step, the fastest that fits, and the text of a plan

benchmarks/check_plan.py compares the predictions with committed measurements: within 20 %.
"""

from .costs import phases as phases
from .propose import Proposal as Proposal, first_that_fits as first_that_fits, proposals as proposals
from .step import StepConfig as StepConfig, gpu_named as gpu_named, step_of as step_of
