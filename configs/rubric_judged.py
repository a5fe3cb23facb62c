r"""Answers judged by rubrics: two judges behind endpoints, the smaller verdict, rules for the rest.

  python -m agentjax.train --config=configs/rubric_judged.py --workdir=runs/rubric \
      --config.pretrained=FOLDER --config.data.path=DIR

``DIR/train.jsonl`` and ``DIR/test.jsonl`` hold a question and its rubric a row::

  {"question": "Why is the sky blue?", "metadata": {"rubric": [
    {"text": "Names the scattering of light."},
    {"text": "Says that light is reflected by the sea.", "kind": "pitfall"},
    {"text": "Is short.", "kind": "optional", "verify": "most_words", "argument": "80"}]}}

FOLDER is that of a model, as in qwen3_gsm8k_python.py, whose lengths and rates these are. Items
with a rule ask nobody; where all have one no judge is needed. "veto_saturating" is of rubric
anchors (2508.12790), its closed form ours; the minimum of the verdicts is MaxProof's (2606.13473).
Scores that rise with length raise a warning: they are the first sign of a judge being gamed.
"""

import pathlib

from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.recipes.rubrics.rubric import RubricConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("qwen3_gsm8k_python.py"))
  experiment.name = "rubric_judged"
  experiment.chat.system_prompt = ""
  experiment.data = DataConfig(
    train_size=None,
    test_size=64,
    source=JsonlConfig(name="rubrics", answer_field=""),
  )
  experiment.tools.names = ()
  experiment.rollout.max_turns = 1
  experiment.rollout.answer = "text"  # the whole turn is judged
  experiment.reward = RewardConfig(
    parts=("rubric",),
    settings={
      "rubric": RubricConfig(
        aggregate="veto_saturating",
        combine="min",
        judges=(
          HttpJudgeConfig("http://localhost:8000/v1", "judge"),
          HttpJudgeConfig("http://localhost:8001/v1", "another-judge"),
        ),
      )
    },
  )
  experiment.evaluation.success_part = "rubric"
  experiment.evaluation.success_threshold = 0.8
  return experiment
