"""Reinforcement learning on one GPU: sampled from, and learnt by, the same weights.

    gpubound.rl.train(policy, prompts, rewards, **keys) trains as the command `gpubound rl` does        loop.py
    RLRecipe       every option of a run                                                             recipe.py
    ExactMatch, Regex, UnitTests    rewards of verifiable answers                                    rewards.py
    Episode, PythonTool, RetryTests    answers of several turns, with an environment    episodes.py
    run_code       Python code that a model wrote, in a process with limits                          rewards.py
    rollout_func   sampling for TRL's GRPOTrainer                                                    trl.py

docs/rl.md describes how they fit together.
"""

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .episodes import Episode as Episode, PythonTool as PythonTool, RetryTests as RetryTests
    from .loop import train as train
    from .recipe import RLRecipe as RLRecipe
    from .rewards import ExactMatch as ExactMatch, Regex as Regex, UnitTests as UnitTests, run_code as run_code

# Imported when first used: the command reads its options before it imports torch.
_MODULES = {
    "Episode": "episodes",
    "ExactMatch": "rewards",
    "PythonTool": "episodes",
    "RLRecipe": "recipe",
    "Regex": "rewards",
    "RetryTests": "episodes",
    "UnitTests": "rewards",
    "run_code": "rewards",
    "train": "loop",
}

__all__ = list(_MODULES)
__getattr__, __dir__ = _lazy(__name__, _MODULES)
