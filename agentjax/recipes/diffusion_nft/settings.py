"""Sizes of the experiment with drawings. All numbers are ours; the paper's models are far larger.

The paper's: students of 8B parameters; 64 prompts of 8 images a step at 512 pixels, LoRA of rank
64, learning rate 2e-4 or 3e-4.
"""

from __future__ import annotations

import dataclasses

from agentjax.config import Config, NonNegativeInt, PositiveFloat, PositiveInt, Share, check
from agentjax.recipes.diffusion_nft.nft import NftConfig
from agentjax.recipes.diffusion_nft.pairs import TeacherConfig
from agentjax.recipes.diffusion_nft.refine import RefineConfig


@dataclasses.dataclass(unsafe_hash=True)
class NetConfig(Config):
  """A transformer and its training by Adam with a cosine that ends at 0.

  Attributes:
    layers, width, heads: of the transformer.
    steps, batch, learning_rate: of its training.
  """

  layers: PositiveInt = 3
  width: PositiveInt = 64
  heads: PositiveInt = 4
  steps: PositiveInt = 600
  batch: PositiveInt = 64
  learning_rate: PositiveFloat = 1e-3

  def validate(self, path: str = "net") -> None:
    super().validate(path)
    divides = self.width % self.heads == 0
    check(divides, f"{path}.heads", self.heads, f"a divisor of {path}.width={self.width}")


@dataclasses.dataclass(unsafe_hash=True)
class TuneConfig(Config):
  """Fine-tuning of the generator by a reward.

  Attributes:
    steps: of sampling and learning.
    prompts, images: a step; images is the number of a group (8 in the paper).
    updates: of the weights a step, each over all images at new times.
    learning_rate: of Adam, without a schedule.
    every: steps between two measurements.
    loss: constants of DiffusionNFT.
  """

  steps: PositiveInt = 60
  prompts: PositiveInt = 16
  images: PositiveInt = 8
  updates: PositiveInt = 2
  learning_rate: PositiveFloat = 1e-4
  every: PositiveInt = 10
  loss: NftConfig = dataclasses.field(default_factory=NftConfig)

  def validate(self, path: str = "tune") -> None:
    super().validate(path)
    check(self.images >= 2, f"{path}.images", self.images, ">= 2: a group has a deviation")
    check(self.steps % self.every == 0, f"{path}.every", self.every, f"a divisor of {path}.steps")


@dataclasses.dataclass(unsafe_hash=True)
class DrawingsConfig(Config):
  """The experiment.

  Attributes:
    seed: of all randomness.
    generator, critic: networks; both critics have the same.
    drawings: rendered for the generator, which sees them again and again.
    wrong_captions: probability that an attribute of a training caption is wrong, so that the
      generator has something left to learn from a reward.
    left_out: probability that an aspect is left out of a condition in training.
    draw_steps: Euler steps of an image.
    pairs: numbers of training pairs for which the critics are compared; the last critics reward.
    held_out_pairs: that measure them.
    corrupted: probability that an attribute of a rendered drawing is not that of its prompt. Half
      of the pairs are rendered, half come from the generator.
    checks: times that a critic is measured on a tenth of its pairs while it learns; the best is
      kept.
    teacher: annotator and teacher.
    held_out_prompts: prompts on which a generator is measured; no reward is computed for them in
      training.
    measured_images: for each of these prompts.
    tune: fine-tuning.
    refine: of conditions at test time.
  """

  seed: NonNegativeInt = 0
  generator: NetConfig = dataclasses.field(
    default_factory=lambda: NetConfig(layers=4, width=96, steps=2000)
  )
  critic: NetConfig = dataclasses.field(default_factory=NetConfig)
  drawings: PositiveInt = 6000
  wrong_captions: Share = 0.25
  left_out: Share = 0.1
  draw_steps: PositiveInt = 10
  pairs: tuple[int, ...] = (100, 400, 1600)
  held_out_pairs: PositiveInt = 1000
  corrupted: Share = 0.35
  checks: PositiveInt = 6
  teacher: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)
  held_out_prompts: PositiveInt = 48
  measured_images: PositiveInt = 8
  tune: TuneConfig = dataclasses.field(default_factory=TuneConfig)
  refine: RefineConfig = dataclasses.field(default_factory=RefineConfig)

  def validate(self, path: str = "drawings") -> None:
    super().validate(path)
    require = self.requirements(path)
    rising = list(self.pairs) == sorted(set(self.pairs))
    require(bool(self.pairs) and self.pairs[0] >= 20 and rising, "pairs", "rising numbers >= 20")
    require(self.critic.steps % self.checks == 0, "checks", "a divisor of critic.steps")
    require(self.held_out_prompts <= 240, "held_out_prompts", "at most 240 of the 288 prompts")
