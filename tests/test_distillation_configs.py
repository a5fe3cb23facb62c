"""The runs of docs/distillation.md are valid, and differ in what they say they differ in."""

import pathlib

import pytest
from absl import flags

from agentjax.training import load_experiment
from agentjax.training.flags import define_config_flag

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
  "name", ["opd", "opd_top_k", "lightning_opd", "lightning_opd_top_k", "dsrl"]
)
def test_a_config_is_valid(name):
  load_experiment(_CONFIGS / f"{name}_word_problems.py").validate()


def test_forms_of_distillation_are_flags():
  values = flags.FlagValues()
  prefix = "--config.rl.objective.distillation"
  argv = [
    "train",
    f"--config={_CONFIGS}/opd_word_problems.py",
    f"{prefix}.form=full",
    f"{prefix}.keep=0.5",
  ]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  distillation = config.value.rl.objective.distillation
  assert (distillation.form, distillation.keep) == ("full", 0.5)
  config.value.validate()


def test_the_warm_start_of_the_student_is_the_same_config_without_a_teacher():
  values = flags.FlagValues()
  argv = [
    "train",
    f"--config={_CONFIGS}/opd_word_problems.py",
    "--config.rl.steps=0",
    "--config.rl.teachers=",
    "--config.rl.objective.distillation=none",
  ]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  assert config.value.rl.teachers == () and config.value.rl.objective.distillation is None
  config.value.validate()
