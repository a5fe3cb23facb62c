"""Preferences between drawings, and PARROT's rationales for them.

Two drawings for one prompt are compared by an annotator who prefers the one with more attributes
right, with errors (Bradley-Terry in the number of attributes). A teacher that reads attributes with
errors writes a rationale for each drawing. It knows the label: it reads again, up to ``tries``
times, until its rationales lead to the label (rejection sampling of q(z | x, y)). The consistency
filter keeps the pairs from whose rationales the label follows. The student sees no label.

Legend: N pairs, A aspects, R rationale tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from agentjax.config import Config, PositiveFloat, PositiveInt, Share
from agentjax.recipes.diffusion_nft.critic import reward_of, write_rationale
from agentjax.recipes.diffusion_nft.drawings import SIZES, UNCLEAR, agrees


@dataclasses.dataclass(unsafe_hash=True)
class TeacherConfig(Config):
  """The annotator and the teacher. All numbers are ours.

  Attributes:
    certainty: the annotator is right with probability sigmoid(certainty * difference in right
      attributes).
    error: probability that the teacher misreads an attribute.
    tries: readings of a pair, at most.
  """

  certainty: PositiveFloat = 2.0
  error: Share = 0.2
  tries: PositiveInt = 2


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Drawings to compare.

  Attributes:
    prompts: [N, A].
    images: [N, 2, 32, 32, 3].
    rows: [N, 2, A], their attributes.
    second: [N], whether the annotator prefers the second.
  """

  prompts: Int[np.ndarray, "N A"]
  images: Float[np.ndarray, "N 2 32 32 3"]
  rows: Int[np.ndarray, "N 2 A"]
  second: Bool[np.ndarray, " N"]

  def __len__(self) -> int:
    return len(self.prompts)

  def take(self, index: np.ndarray | slice) -> Pairs:
    """The pairs of an index."""
    return Pairs(self.prompts[index], self.images[index], self.rows[index], self.second[index])

  @property
  def truly_second(self) -> Bool[np.ndarray, " N"]:
    """Whether the second has more attributes right; no pair has as many in both."""
    right = agrees(self.rows, self.prompts[:, None]).sum(axis=2)
    return right[:, 1] > right[:, 0]


def compare(
  rng: np.random.Generator,
  prompts: Int[np.ndarray, "N A"],
  images: Float[np.ndarray, "N 2 32 32 3"],
  rows: Int[np.ndarray, "N 2 A"],
  config: TeacherConfig,
) -> Pairs:
  """Labels pairs; those with equally many right attributes are left out."""
  right = agrees(rows, prompts[:, None]).sum(axis=2)
  ahead = right[:, 1] - right[:, 0]
  second = rng.random(len(ahead)) < 1 / (1 + np.exp(-config.certainty * ahead))
  return Pairs(prompts, images, rows, second).take(np.flatnonzero(ahead))


def anchored_rationales(
  rng: np.random.Generator, pairs: Pairs, config: TeacherConfig
) -> Int[np.ndarray, "N 2 R"]:
  """The teacher's rationales for both drawings of each pair; it knows the labels."""
  found = _read(rng, pairs, config)
  for _ in range(config.tries - 1):
    again = ~consistent(found, pairs.second)
    found[again] = _read(rng, pairs, config)[again]
  return found


def _read(
  rng: np.random.Generator, pairs: Pairs, config: TeacherConfig
) -> Int[np.ndarray, "N 2 R"]:
  """One reading of every pair. What is unclear may be misread as any value."""
  wrong = (pairs.rows + rng.integers(1, SIZES, pairs.rows.shape)) % SIZES
  misread = rng.random(pairs.rows.shape) < config.error
  seen = np.where(misread, wrong, np.where(pairs.rows < 0, UNCLEAR, pairs.rows))
  both = [write_rationale(seen[:, i], pairs.prompts) for i in (0, 1)]
  return np.stack(both, axis=1)


def consistent(
  rationales: Int[np.ndarray, "N 2 R"], second: Bool[np.ndarray, " N"]
) -> Bool[np.ndarray, " N"]:
  """From which rationales the label follows; none follows from equal rewards."""
  ahead = reward_of(rationales[:, 1]) - reward_of(rationales[:, 0])
  return np.where(second, ahead > 0, ahead < 0)
