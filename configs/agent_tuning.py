r"""AgentTuning: a fifth of trajectories with tools, the rest general conversations.

  python -m agentjax.train --config=configs/agent_tuning.py --workdir=runs/agent_tuning \
      --config.pretrained=FOLDER --config.data.path=DIR

``eta E_agent log pi + (1 - eta) E_general log pi`` (2310.12823). DIR holds general conversations as
in configs/supervised.py; the trajectories here are generated word problems that are worked out with
tools. ``data.source.weights`` are the shares eta and 1 - eta of the demonstrations.
"""

import pathlib

from agentjax.data.config import JsonlConfig, MixtureConfig
from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment
from agentjax.worlds.question.word_problems import WordProblemConfig

RECIPES = (
  Recipe(
    name="AgentTuning",
    paper="2310.12823 and its code",
    changes="Trajectories of agents are mixed with general conversations in fixed shares, so that "
    "acting is learnt and little else forgotten.",
    commands=(
      "python -m agentjax.train --config=configs/agent_tuning.py --workdir=runs/agent_tuning \\\n"
      "  --config.pretrained=FOLDER --config.data.path=DIR",
    ),
    tests=("tests/data/test_pipeline.py", "tests/recipes/test_configs_of_methods.py"),
    data="word problems, generated, in place of AgentInstruct; DIR/train.jsonl, a conversation a "
    "row",
    ours="eta .2 is from memory of the paper; rate, batch and steps",
    page="supervised.md",
  ),
)


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("supervised.py"))
  experiment.name = "agent_tuning"
  experiment.tools.names = ("calculator", "python")
  experiment.data.train_size, experiment.data.test_size = 10_000, 0
  experiment.data.source = MixtureConfig(
    sources=(
      WordProblemConfig(direct_share=0.0),
      JsonlConfig(messages_field="messages", answer_field="", test_file=""),
    ),
    weights=(0.2, 0.8),
  )
  return experiment
