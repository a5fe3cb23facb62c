r"""The quickstart with experts as LongCat-Flash trains them (2509.01322).

  python -m agentjax.train --config=configs/longcat_experts_word_problems.py \
      --workdir=runs/longcat_experts

Beside four routed experts there are two that return their input, so tokens take different amounts
of computation: 3 choices each, of which 2 are to be routed ones in the mean. The bias of each
routed expert moves in proportion to its gap in load, ``mu (K_e / K / N - T_i / (K T))``; the others
have none. Scores are a softmax and not divided by the sum of the chosen; Adam's epsilon is 1e-16.
Sizes, mu and rates are ours.
"""

import pathlib

from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="LongCat-Flash (rules for experts and optimiser)",
    paper="2509.01322, second-hand, and its modelling code",
    changes=(
      "Some experts return their input; the bias of the others moves in proportion to the gap "
      "between wanted and found load, in place of its sign; Adam's epsilon is 1e-16."
    ),
    commands=(
      "python -m agentjax.train --config=configs/longcat_experts_word_problems.py \\\n"
      "  --workdir=runs/longcat_experts",
    ),
    tests=("tests/models/test_router.py", "tests/adapters/model_families/test_longcat.py"),
    data="any; here word problems, generated",
    ours="mu, sizes and rates",
    missing="The z-loss on hidden states (z_loss_coefficient is on the output's logits), growth by "
    "stacking of layers, the transfer of rates from a narrow model, and the balance over devices",
    page="models.md#training-them",
  ),
)


def with_rules(experiment: Experiment) -> Experiment:
  """Gives it experts that return their input, and the rules."""
  model = experiment.model
  model.zero_experts, model.experts_per_token, model.active_experts = 2, 3, 2.0
  model.router_scores, model.norm_topk, model.d_shared_expert = "softmax", False, 0
  model.router_bias_rule = "proportional"
  for stage in (experiment.supervised, experiment.rl):
    stage.router_bias_rate = 1e-2
    stage.optimizer.eps = 1e-16
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "longcat_experts_word_problems"
  return with_rules(experiment)
