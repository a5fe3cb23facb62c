"""Settings of Digi-Q. What no source gives is marked as ours."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from agentjax.config import (
  Config,
  NonNegativeInt,
  PositiveInt,
  PositiveShare,
  Share,
  check,
)
from agentjax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(unsafe_hash=True)
class RecordConfig(Config):
  """How turns of stored episodes become transitions.

  Attributes:
    compare: regular expression; the last match in an observation is what is compared with that of
      the observation before, such as the board of a game. "" compares whole texts. Ours: the source
      compares the pixels of two screens.
    shown_turns: turns before the present one that stand in the text of a state, beside the prompt;
      None is all of them. Ours.
  """

  compare: str = ""
  shown_turns: NonNegativeInt | None = None

  def validate(self, path: str = "record") -> None:
    super().validate(path)
    try:
      re.compile(self.compare)
    except re.error as error:
      check(False, f"{path}.compare", self.compare, f"a regular expression ({error})")


@dataclasses.dataclass(unsafe_hash=True)
class CriticConfig(Config):
  """The heads on frozen features, and how they learn.

  Attributes:
    layer: block of the backbone after which features are read, from 0; None is the middle one. The
      source reads an intermediate layer.
    width, hidden: of the hidden layers of a head, and how many. Ours.
    loss: "cross_entropy" (of values from 0 to 1) or "mse"; the source has both.
    gamma: discount; .9 to .95 in the source.
    tau: share of the new heads in the target heads after an update; .1 in the source.
    steps, batch: updates, and transitions in each. Ours.
    optimizer: of the heads. Ours.
    forward_rows: texts that the backbone reads at once.
    keep_every: updates between two saved states.
    seed: of the heads and of the batches.
  """

  layer: NonNegativeInt | None = None
  width: PositiveInt = 256
  hidden: PositiveInt = 2
  loss: Literal["cross_entropy", "mse"] = "cross_entropy"
  gamma: Share = 0.95
  tau: PositiveShare = 0.1
  steps: PositiveInt = 2000
  batch: PositiveInt = 256
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=lambda: OptimizerConfig(learning_rate=3e-4)
  )
  forward_rows: PositiveInt = 16
  keep_every: PositiveInt = 500
  seed: NonNegativeInt = 0


@dataclasses.dataclass(unsafe_hash=True)
class ExtractionConfig(Config):
  """Which actions are imitated.

  Attributes:
    stored: candidates that are drawn for each state and kept (64 in the source).
    used: of these, the first so many are compared (4 to 16 in the source).
    threshold: the best candidate is imitated if its advantage is above it (.05 on WebShop and .10
      on General in the source).
    heads: which of the two values counts, of the action and of the state; the source takes the
      larger one.
    states: that candidates are drawn for, chosen at random; None is all. Ours.
  """

  stored: PositiveInt = 64
  used: PositiveInt = 16
  threshold: float = 0.05
  heads: Literal["max", "min"] = "max"
  states: PositiveInt | None = None

  def validate(self, path: str = "extraction") -> None:
    super().validate(path)
    said = f"at most {path}.stored={self.stored}"
    check(self.used <= self.stored, f"{path}.used", self.used, said)
