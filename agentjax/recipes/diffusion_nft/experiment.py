"""The experiment with drawings: critics, fine-tuning by them, and refinement at test time.

``results.json`` holds all numbers, ``drawings.png`` the figure. Right attributes are counted by
``read_drawings``, which learns nothing, on prompts for which no reward was computed in training.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from agentjax.files import write_atomically
from agentjax.recipes.diffusion_nft.critic import judge, read_rationale
from agentjax.recipes.diffusion_nft.drawings import ASPECTS, agrees, describe, read_drawings
from agentjax.recipes.diffusion_nft.figure import Example, draw_figure
from agentjax.recipes.diffusion_nft.generator import Generator, condition_of
from agentjax.recipes.diffusion_nft.pairs import Pairs
from agentjax.recipes.diffusion_nft.refine import refine
from agentjax.recipes.diffusion_nft.settings import DrawingsConfig
from agentjax.recipes.diffusion_nft.training import (
  Critics,
  Measured,
  Report,
  draw_images,
  held_out_prompts,
  in_batches,
  make_pairs,
  measure,
  prefers_second,
  train_critics,
  train_generator,
  tune,
)
from agentjax.rollout.evaluation import bootstrap

_RESAMPLES, _CONFIDENCE = 2000, 0.95
_EXAMPLES = 6  # of prompts in the figure

Row = dict[str, Any]


def run_experiment(
  config: DrawingsConfig, output: str | os.PathLike[str], report: Report = lambda text: None
) -> Row:
  """Runs it all and writes the results.

  Args:
    config: validated and frozen here.
    output: folder of ``results.json`` and ``drawings.png``.
    report: called with a line of text now and then.
  """
  config.validate("drawings")
  config.freeze()
  folder = pathlib.Path(output)
  folder.mkdir(parents=True, exist_ok=True)
  generator = train_generator(config, report)
  training, held_out = make_pairs(config, generator)
  results: Row = {"settings": config.to_dict(), "pairs": []}
  for count in config.pairs:
    critics = train_critics(config, training.take(slice(count)))
    results["pairs"].append(compare_critics(config, critics, held_out, count))
    report(f"critics: {results['pairs'][-1]}")
  results["generators"] = {"before": _told(config, measure(config, generator))}
  results["curves"], tuned = {}, {}
  for name, reward in (("rational", critics.rational_reward), ("scalar", critics.scalar_reward)):
    tuned[name], results["curves"][name] = tune(config, generator, reward, report)
    results["generators"][name] = _told(config, measure(config, tuned[name]))
  examples, results["refinement"] = refine_drawings(config, generator, critics)
  results["refinement_tuned"] = refine_drawings(config, tuned["rational"], critics)[1]
  write_atomically(folder / "results.json", json.dumps(results, indent=1) + "\n")
  shown = _examples(config, tuned, examples)
  write_atomically(folder / "drawings.png", draw_figure(results, shown))
  return results


def _estimate(config: DrawingsConfig, values: np.ndarray) -> list[float]:
  """Mean with its bootstrap interval, as [mean, low, high]."""
  found = bootstrap(
    values.tolist(), seed=[config.seed], resamples=_RESAMPLES, confidence=_CONFIDENCE
  )
  return [found.mean, found.low, found.high]


def compare_critics(config: DrawingsConfig, critics: Critics, held_out: Pairs, count: int) -> Row:
  """How often each prefers the drawing with more attributes right; the annotator for comparison."""
  truth = held_out.truly_second
  said = {
    "rational": prefers_second(critics.rational_reward, held_out),
    "scalar": prefers_second(critics.scores, held_out),
    "annotator": held_out.second.astype(float),
  }
  right = {name: np.where(truth, value, 1 - value) for name, value in said.items()}
  row: Row = {"pairs": count, "kept": critics.kept}
  row |= {name: _estimate(config, value) for name, value in right.items()}
  return row | {"difference": _estimate(config, right["rational"] - right["scalar"])}


def _told(config: DrawingsConfig, measured: Measured) -> Row:
  """Share of right attributes, over prompts, and by aspect."""
  aspects = dict(zip(ASPECTS, measured.right.mean(axis=0).tolist(), strict=True))
  return {"right": _estimate(config, measured.right.mean(axis=1)), **aspects}


@dataclasses.dataclass(frozen=True)
class Refined:
  """First and second drawings for the same prompts, with the rationale about the first."""

  prompts: np.ndarray
  first: np.ndarray
  rationales: np.ndarray
  second: np.ndarray


def refine_drawings(
  config: DrawingsConfig, generator: Generator, critics: Critics
) -> tuple[Refined, Row]:
  """One round of generate, critique, refine on the held-out prompts, against what costs as much.

  "again" draws the criticised images anew with the same prompt, "refined" with the edited one. With
  "_best" the drawing with the higher reward is kept, otherwise the second.
  """
  prompts = np.repeat(held_out_prompts(config)[0], config.measured_images, axis=0)
  plain, key = condition_of(prompts), jax.random.key(config.seed + 4)
  first = draw_images(generator, jax.random.fold_in(key, 0), plain, config.draw_steps)
  rationales = in_batches(lambda i, p: judge(critics.rational, i, p).rationales, first, prompts)
  before = critics.rational_reward(first, prompts)
  edited = refine(prompts, rationales, config.refine)
  criticised = (edited != plain).any(axis=1)
  row: Row = {"criticised": float(criticised.mean()), "once": _right(config, first, prompts)}
  kept = {}
  for name, condition in (("again", plain), ("refined", edited)):
    drawn = draw_images(generator, jax.random.fold_in(key, 1), condition, config.draw_steps)
    second = np.where(criticised[:, None, None, None], drawn, first)
    better = critics.rational_reward(second, prompts) > before
    kept[name] = second
    kept[f"{name}_best"] = np.where(better[:, None, None, None], second, first)
  row |= {name: _right(config, images, prompts) for name, images in kept.items()}
  return Refined(prompts, first, rationales, kept["refined"]), row


def _right(config: DrawingsConfig, images: np.ndarray, prompts: np.ndarray) -> list[float]:
  """Share of right attributes with an interval over prompts."""
  right = agrees(read_drawings(images), prompts).mean(axis=1)
  return _estimate(config, right.reshape(-1, config.measured_images).mean(axis=1))


def _examples(
  config: DrawingsConfig, tuned: dict[str, Generator], refined: Refined
) -> list[Example]:
  """Drawings of the first prompts: before, refined, and from the tuned generators."""
  places = np.arange(_EXAMPLES) * config.measured_images % len(refined.prompts)
  prompts = refined.prompts[places]
  key = jax.random.fold_in(jax.random.key(config.seed + 4), 0)  # the noise of the first drawings
  condition = condition_of(refined.prompts)
  after = {
    name: draw_images(params, key, condition, config.draw_steps)[places]
    for name, params in tuned.items()
  }
  return [
    Example(
      describe(prompt),
      read_rationale(refined.rationales[place]),
      {
        "first": refined.first[place],
        "refined": refined.second[place],
        "tuned by the rational critic": after["rational"][number],
        "tuned by the scalar critic": after["scalar"][number],
      },
    )
    for number, (prompt, place) in enumerate(zip(prompts, places, strict=True))
  ]
