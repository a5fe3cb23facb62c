"""A whole run in a folder: four policies of each seed, measured. It goes on where it was stopped.

settings.json          what the run was made with
seed_N/imitation       state of the imitation, then of its end
seed_N/VARIANT         state of the rounds of a variant; VARIANT.jsonl its metrics, a row a round
seed_N/measured.json   numbers of every test scenario, by policy
report.json, policies.png, replay.gif
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from agentjax.data.synthesis_folder import Report, claim
from agentjax.files import write_atomically
from agentjax.recipes.rad2.measuring import (
  EXPERT,
  POLICIES,
  Policy,
  Test,
  measure,
  numbers_of,
  play_test,
  prepare_test,
  report_of,
)
from agentjax.recipes.rad2.pictures import compare, replay
from agentjax.recipes.rad2.planners import Mode
from agentjax.recipes.rad2.settings import Rad2Config
from agentjax.recipes.rad2.training import (
  VARIANTS,
  Learner,
  Lessons,
  Variant,
  begin,
  imitate,
  initial_generator,
  play_and_learn,
  prepare_lessons,
)
from agentjax.training.optimizer import bad_steps

T = TypeVar("T")
_IMITATION_KEPT = 500  # updates between two saved states


def run(config: Rad2Config, folder: str | os.PathLike[str], report: Report) -> dict[str, Any]:
  """Trains what is not trained yet, measures, writes the report and the pictures.

  Args:
    config: validated and frozen here.
    folder: new, empty, or of an earlier call with the same settings.
    report: told of the progress of each stage.

  Returns:
    What ``report.json`` holds.

  Raises:
    ConfigError: a wrong setting, or a folder of other settings.
  """
  config.validate("rad2")
  config.freeze()
  directory = claim(folder, config.to_dict(), ("report.json",))
  test = prepare_test(config)
  numbers: dict[str, list[Any]] = {name: [] for name in POLICIES}
  shown: dict[str, Policy] = {}
  for seed in range(config.seed, config.seed + config.seeds):
    place = directory / f"seed_{seed}"
    place.mkdir(exist_ok=True)
    policies = _policies(config, place, seed, report)
    measured = place / "measured.json"
    if not measured.exists():
      found = {name: measure(config, one, test, seed) for name, one in policies.items()}
      write_atomically(measured, json.dumps(found) + "\n")
    for name, row in json.loads(measured.read_text()).items():
      numbers[name].append(row)
    shown = shown or policies
  kinds = np.asarray(test.scenarios.kind).tolist()
  rows = {**numbers, EXPERT: [numbers_of(test.expert)] * config.seeds}
  result = report_of(config, kinds, rows)
  write_atomically(directory / "report.json", json.dumps(result, indent=2) + "\n")
  write_atomically(directory / "policies.png", compare(result, [*POLICIES, EXPERT]))
  write_atomically(directory / "replay.gif", _replay(config, test, shown, numbers))
  return result


def _policies(
  config: Rad2Config, place: pathlib.Path, seed: int, report: Report
) -> dict[str, Policy]:
  """The four policies of a seed, trained as far as they are not."""
  lessons = prepare_lessons(config, seed)
  generator = _imitated(config, place / "imitation", lessons, seed, report)
  policies: dict[str, Policy] = {}
  for variant in VARIANTS:
    learner = _learnt(config, place, generator, lessons, seed, variant, report)
    if not policies:
      policies["imitation"] = Policy(generator, learner.discriminator, "propose")
    mode: Mode = "propose" if variant == "generator" else "best"
    policies[variant] = Policy(learner.generator, learner.discriminator, mode)
  return policies


def _imitated(
  config: Rad2Config, path: pathlib.Path, lessons: Lessons, seed: int, report: Report
) -> Any:
  total, what = config.training.imitation_steps, f"seed {seed}, imitation"
  generator, state = initial_generator(config, seed)
  kept = {"generator": generator, "state": state, "done": jnp.int32(0)}
  kept = _restored(path, kept)
  report(what, int(kept["done"]), total)
  while (done := int(kept["done"])) < total:
    steps = min(_IMITATION_KEPT, total - done)
    generator, state, _ = imitate(
      config, kept["generator"], kept["state"], lessons, seed, done, steps=steps
    )
    _check_finite(state, f"imitation, update {done + steps}")
    kept = {"generator": generator, "state": state, "done": jnp.int32(done + steps)}
    _save(path, kept)
    report(what, done + steps, total)
  return kept["generator"]


def _learnt(
  config: Rad2Config,
  place: pathlib.Path,
  generator: Any,
  lessons: Lessons,
  seed: int,
  variant: Variant,
  report: Report,
) -> Learner:
  total, path = config.training.rounds, place / variant
  learner = _restored(path, begin(config, generator, lessons, seed, variant))
  metrics = place / f"{variant}.jsonl"
  rows = metrics.read_text().splitlines()[: int(learner.done)] if metrics.exists() else []
  what = f"seed {seed}, {variant}"
  report(what, int(learner.done), total)
  while (done := int(learner.done)) < total:
    learner, row = play_and_learn(config, learner, lessons, seed, variant=variant)
    values = {name: float(value) for name, value in row.items() if np.isfinite(value)}
    rows.append(json.dumps({"round": done, **values}))
    if (done + 1) % config.training.keep_every == 0 or done + 1 == total:
      for state in (learner.tuning, learner.choosing):
        _check_finite(state, f"{variant}, round {done}")
      write_atomically(metrics, "\n".join(rows) + "\n")  # before the state, which says how many
      _save(path, learner)
    report(what, done + 1, total)
  return learner


def _replay(
  config: Rad2Config, test: Test, policies: dict[str, Policy], numbers: dict[str, list[Any]]
) -> bytes:
  """Of the first scenario in which imitation crashes and both networks together do not.

  Without such a scenario it is the first of all. Policies and draws are those of the first seed.
  """
  first, last = (np.array(numbers[name][0]["crashed"]) for name in ("imitation", "both"))
  place = int(np.argmax(first > last))
  episodes = {
    name: jax.tree.map(lambda v: v[place], play_test(config, policy, test.scenarios, config.seed))
    for name, policy in policies.items()
  }
  return replay(config.traffic, jax.tree.map(lambda v: v[place], test.scenarios), episodes)


def _check_finite(state: Any, where: str) -> None:
  if skipped := int(bad_steps(state)):
    raise FloatingPointError(f"{where}: {skipped} updates in a row had no finite gradient")


def _save(path: pathlib.Path, state: Any) -> None:
  write_atomically(path, serialization.to_bytes(jax.device_get(state)))


def _restored(path: pathlib.Path, template: T) -> T:
  """What was saved, or the template itself if nothing was."""
  if not path.exists():
    return template
  read: Callable[[T, bytes], T] = serialization.from_bytes
  return jax.tree.map(jnp.asarray, read(template, path.read_bytes()))
