r"""Word problems at toy size under rules: no program reads files, no call is made three times.

  python -m agentjax.train --config=configs/agentspec_word_problems.py --workdir=runs/agentspec

The rules are of AgentSpec's language (2503.18666; docs/agentspec.md). A refused call is answered
with the reason, and the policy learns from what follows. --config.guards.rules.file=FILE adds rules
of your own. Everything else is configs/quickstart.py.
"""

import pathlib

from agentjax.recipes.agentspec import AgentSpecConfig
from agentjax.training import Experiment, load_experiment

_RULES = r"""
rule @no-files
trigger python
check input_matches("\\bopen\\s*\\(|\\bos\\.|\\bsubprocess\\b")
enforce skip
end

rule @not-again
trigger before_action
check is_repeated(2)
enforce llm_self_reflect
end
"""


def change(experiment: Experiment) -> Experiment:
  """Gives it the rules."""
  experiment.guards.rules = AgentSpecConfig(text=_RULES)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "agentspec_word_problems"
  return change(experiment)
