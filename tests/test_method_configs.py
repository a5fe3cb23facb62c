"""Configs of methods are valid, and are what docs/recipes.md and docs/reward_models.md say."""

import pathlib
import shlex

import pytest
from absl import flags

from agentjax.config import ConfigError
from agentjax.objectives.custom_loss import load_function
from agentjax.recipes.credit.entropy import entropy_balanced_clip
from agentjax.recipes.selectors import about
from agentjax.text import ChatConfig, TokenizerConfig
from agentjax.training import Experiment, Run, load_experiment
from agentjax.training.flags import define_config_flag
from tests.training.smoke import quiet

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


_SUCCESSES = about.RECIPES[0].commands[0].replace("\\\n", " ")
_TOY = ("agentspec", "meds", "moclip", "self_play_preference", "sppo", "tessy")
_COMBINED = """a3t agent0 agent_rlvr agentcpm artist dart deep_analyze grpo_tcr ipa istar kimi
ppr self_critique""".split()
_CHANGES = dict.fromkeys(("agent0", "grpo_tcr"), ("--config.rl.tasks_per_step=4",))
_FROM_FILES = """c2_judged genrm_judged rational_rewards_judged rubric_judged
self_critique_questions supervised""".split()


@pytest.mark.parametrize(
  "name", [*(f"{n}_word_problems" for n in _TOY), "tessy_boundary", "tree_search_sokoban"]
)
def test_a_config_is_valid(name):
  load_experiment(_CONFIGS / f"{name}.py").validate()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("agentspec_word_problems", ()),
    ("self_play_preference_word_problems", ()),
    ("sppo_word_problems", ("--config.rl.tasks_per_step=8",)),
    ("tree_search_sokoban", ()),
    ("tree_search_sokoban", ("--config.rollout.sampler.rule=uct",)),
    *((f"{name}_word_problems", _CHANGES.get(name, ())) for name in _COMBINED),
    ("interplay", ()),
    ("mua_rl_shop", ()),
    ("turn_gae_sokoban", ("--config.rl.phases=",)),
  ],
)
def test_a_short_run_of_it_ends(name, changes, tmp_path):
  experiment = _with_flags(
    name,
    "--config.rl.steps=2",
    "--config.rl.tasks_per_step=2",
    "--config.supervised.steps=2",
    "--config.evaluation.tasks=0",
    *changes,
  )
  assert Run(experiment, tmp_path, console=quiet()).train().finished


@pytest.mark.parametrize("name", ["c2_generator", "c2_verifier", *_FROM_FILES])
def test_a_config_of_a_pretrained_model_lacks_its_folder_alone(name):
  experiment = load_experiment(_CONFIGS / f"{name}.py")
  if name in _FROM_FILES:
    with pytest.raises(ConfigError, match="set --config.data.path=DIR"):
      experiment.validate()
    experiment.data.path = "rubrics"
  for part in ("data", "reward", "rollout", "engine", "rl"):
    getattr(experiment, part).validate(f"config.{part}")
  with pytest.raises(ConfigError, match="set --config.pretrained=DIR"):
    experiment.validate()


def _with_flags(name, *changes):
  values = flags.FlagValues()
  argv = ["train", f"--config={_CONFIGS}/{name}.py", *changes]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  config.value.validate()
  return config.value


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("meds_word_problems", ()),
    ("dart_word_problems", ()),
    ("quickstart", tuple(w for w in shlex.split(_SUCCESSES) if w.startswith("--config."))),
  ],
)
def test_tasks_come_again_where_a_method_remembers_them(name, changes):
  experiment = _with_flags(name, *changes)
  assert experiment.rl.signals
  played = experiment.rl.steps * experiment.rl.tasks_per_step
  assert played >= 4 * experiment.data.train_size


@pytest.mark.parametrize("name", ["code", "problem", "summariser"])
def test_a_config_of_grandcode_lacks_the_folder_of_its_model_alone(name):
  experiment = load_experiment(_CONFIGS / f"grandcode_{name}.py")
  experiment.data.path = "code_tasks"
  with pytest.raises(ConfigError, match="set --config.pretrained=DIR"):
    experiment.validate()
  experiment.tokenizer, experiment.chat = TokenizerConfig(), ChatConfig()
  experiment.model.vocab_size = 264
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).to_dict() == experiment.to_dict()


def test_the_plain_runs_beside_the_recipes_are_flags():
  assert _with_flags("meds_word_problems", "--config.rl.signals=").rl.signals == ()
  plain = _with_flags(
    "moclip_word_problems",
    "--config.supervised.optimizer.direction=none",
    "--config.supervised.token_sets=none",
  ).supervised
  assert (plain.optimizer.direction, plain.token_sets) == (None, None)
  aepo = _with_flags("aepo_word_problems").rl.objective
  assert [term.chosen for term in aepo.advantage.terms] == ["entropy"]
  assert load_function(aepo.function) is entropy_balanced_clip
  tasks = _with_flags("tessy_word_problems", "--config.data.source=word_problems")
  assert tasks.data.source.chosen == "word_problems"


def test_the_generator_of_c2_warms_up_for_a_tenth():
  optimizer = load_experiment(_CONFIGS / "c2_generator.py").rl.optimizer
  assert (optimizer.warmup_steps, optimizer.learning_rate) == (30, 5e-7)
