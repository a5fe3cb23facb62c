"""Measures policies on test scenarios that are the same for all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentjax.recipes.rad2.closed_loop import Episode
from agentjax.recipes.rad2.networks import Discriminator, Generator
from agentjax.recipes.rad2.outcomes import Outcome, outcome
from agentjax.recipes.rad2.planners import Mode, play_policy
from agentjax.recipes.rad2.settings import Rad2Config
from agentjax.recipes.rad2.traffic import KINDS, Scenario, scenarios
from agentjax.recipes.rad2.training import demonstrated, seed_key
from agentjax.rollout.evaluation import Estimate, bootstrap

POLICIES = ("imitation", "generator", "discriminator", "both")
EXPERT = "expert"
_FIRST_TEST = 1_000_000  # number of the first test scenario
_MEASURE = 4  # what a key is for, beside those of training
_CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Policy:
  """Two networks, and how plans are chosen: "propose" never asks the discriminator."""

  generator: Generator
  discriminator: Discriminator
  mode: Mode


@dataclasses.dataclass(frozen=True)
class Test:
  """The test scenarios, the metres that an expert makes in each, and the outcomes of the expert."""

  scenarios: Scenario
  references: Any
  expert: Outcome


def prepare_test(config: Rad2Config) -> Test:
  """The same test for every seed of a run: that of ``config.seed``."""
  found = scenarios(config.seed, _FIRST_TEST, config.training.test_scenarios)
  episodes, references = demonstrated(config, found, config.seed)
  return Test(found, references, _outcomes(config, found, episodes, references))


def play_test(config: Rad2Config, policy: Policy, found: Scenario, seed: int) -> Episode:
  """An episode of each scenario; the keys are folded from the places of the scenarios."""
  key = seed_key(seed, _MEASURE)
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))(np.arange(len(found.kind)))
  return play_policy(config, policy.generator, policy.discriminator, found, keys, mode=policy.mode)


def measure(config: Rad2Config, policy: Policy, test: Test, seed: int) -> dict[str, list[float]]:
  """Numbers of every test scenario, as ``numbers_of`` names them."""
  episodes = play_test(config, policy, test.scenarios, seed)
  return numbers_of(_outcomes(config, test.scenarios, episodes, test.references))


def numbers_of(results: Outcome) -> dict[str, list[float]]:
  """Of every scenario: crashed (0 or 1), progress, whether no collision was within a second, and
  whether the progress was at least the expert's."""
  least, progress = np.asarray(results.least_time), np.asarray(results.progress)
  columns = {
    "crashed": results.crashed,
    "progress": progress,
    "safe_1s": least >= 1.0,
    "progress_1": progress >= 1.0,
  }
  return {name: np.asarray(v, float).round(6).tolist() for name, v in columns.items()}


def report_of(
  config: Rad2Config, kinds: Sequence[int], rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
  """Means of policies with intervals of 95%, and how they compare.

  The mean of a scenario is that over seeds; scenarios are resampled, seeds are not.

  Args:
    config: of the run.
    kinds: of the test scenarios.
    rows: by policy the numbers of each seed.
  """
  found: dict[str, Any] = {}
  for name, seeds in rows.items():
    columns = {c: np.mean([one[c] for one in seeds], axis=0) for c in seeds[0]}
    crashed = columns["crashed"]
    found[name] = {
      **{c: _as_row(_estimate(config, values)) for c, values in columns.items()},
      "crashed_by_seed": [float(np.mean(one["crashed"])) for one in seeds],
      "progress_by_seed": [float(np.mean(one["progress"])) for one in seeds],
      "crashed_by_kind": {
        kind: float(crashed[np.equal(kinds, place)].mean())
        for place, kind in enumerate(KINDS)
        if place in kinds
      },
    }
  differences = {
    f"{first} - {second}": _as_row(
      _estimate(config, np.mean([
        np.subtract(a["crashed"], b["crashed"])
        for a, b in zip(rows[first], rows[second], strict=True)
      ], axis=0))
    )
    for first, second in zip(POLICIES, POLICIES[1:], strict=False)
  }  # fmt: skip
  rates = [found[name]["crashed"]["mean"] for name in POLICIES]
  ordered = all(a > b for a, b in zip(rates, rates[1:], strict=False))
  return {"policies": found, "crashed": differences, "order_of_the_source": ordered}


def _estimate(config: Rad2Config, values: Any) -> Estimate:
  return bootstrap(
    list(values), seed=[config.seed], resamples=config.resamples, confidence=_CONFIDENCE
  )


def _as_row(estimate: Estimate) -> dict[str, float]:
  return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}


def _outcomes(config: Rad2Config, found: Scenario, episodes: Episode, references: Any) -> Outcome:
  return jax.vmap(functools.partial(outcome, config.reward))(found, episodes, references)
