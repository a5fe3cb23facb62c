r"""Kimi K2's self-critique: open questions of your own among word problems, which have a verifier.

  python -m agentjax.train --config=configs/self_critique_questions.py --workdir=runs/questions \
      --config.pretrained=FOLDER --config.data.path=DIR

``DIR/train.jsonl`` and ``DIR/test.jsonl`` hold an open question a row; criteria that people wrote
for it may stand beside it::

  {"question": "Why is the sky blue?", "metadata": {"rubric": ["It names scattering."]}}

Half of the tasks are these, half generated word problems with an answer. The policy compares its
answers to both in pairs. Its preferences pay the answers to open questions; its comparisons of
answers to word problems are paid where they agree with the answer. FOLDER is that of a model, as in
qwen3_gsm8k_python.py, whose lengths and rates these are. An open question has no success, so the
evaluation is of word problems at most by half.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig, MixtureConfig
from agentjax.recipes.self_critique import SelfCritiqueConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment
from agentjax.worlds.question.word_problems import WordProblemConfig

_SYSTEM_PROMPT = (
  "If the question asks for a number, or says so, end with a line that holds only #### and the "
  "answer, for example:\n#### 42"
)


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("qwen3_gsm8k_python.py"))
  experiment.name = "self_critique_questions"
  experiment.chat.system_prompt = _SYSTEM_PROMPT
  experiment.data = DataConfig(
    train_size=10_000,
    test_size=128,
    source=MixtureConfig(
      sources=(JsonlConfig(name="questions", answer_field=""), WordProblemConfig())
    ),
  )
  experiment.tools.names = ()
  experiment.rollout.max_turns = 1
  experiment.rollout.sampler = SelfCritiqueConfig()
  experiment.reward = RewardConfig(
    parts=("exact_match", "preferred", "verified", "critique", "environment"),
    weights=(),
    formula="environment if critique else exact_match if verified else preferred",
  )
  return experiment
