"""Settings of a run of seconds."""

from agentjax.recipes.rad2.settings import Rad2Config


def tiny_config(**training):
  """Not frozen."""
  config = Rad2Config(seeds=1, resamples=50)
  config.traffic.decisions = 5
  config.generator.width = config.discriminator.width = 8
  config.generator.blocks, config.generator.denoising_steps = 1, 2
  config.discriminator.candidates = 3
  small = {
    "scenarios": 8, "test_scenarios": 6, "imitation_steps": 4, "imitation_batch": 8, "rounds": 4,
    "round_scenarios": 3, "group": 2, "buffer": 3, "discriminator_steps": 2, "keep_every": 2,
    "discriminator_batch": 16, "generator_every": 3, "generator_steps": 2, "generator_batch": 8,
    "least_spread": 0.0,
  }  # fmt: skip
  for name, value in (small | training).items():
    setattr(config.training, name, value)
  return config
