"""A folder of a critic; the same call goes on where it was stopped.

settings.json    what it was made with
features.npy     [3, n, D] of actions, states and next states, by the frozen backbone
critic           state of the heads
metrics.jsonl    mean loss of every stretch of updates
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from agentjax.config import ConfigError
from agentjax.data.synthesis_folder import SETTINGS, Report, claim, unreported
from agentjax.files import write_atomically
from agentjax.recipes.digi_q.critic import Critic, Data, Heads, Scale, begin, learn
from agentjax.recipes.digi_q.features import read_features, tapped_layer
from agentjax.recipes.digi_q.recording import read_transitions
from agentjax.recipes.digi_q.settings import CriticConfig
from agentjax.recipes.digi_q.transitions import Transition, question, state_prompt
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import Policy, load_policy_with_chat
from agentjax.training.optimizer import bad_steps

T = TypeVar("T")

FEATURES, STATE, METRICS = "features.npy", "critic", "metrics.jsonl"
_NAMES = ("actions", "states", "next_states")


@dataclasses.dataclass(frozen=True)
class Learnt:
  """A critic that can be asked.

  Attributes:
    config: of it. heads: parameters. layer: of the backbone.
    actions, states: scales of the features that the heads read.
    losses: mean loss of the first and of the last stretch of updates.
    identity: of the backbone.
  """

  config: CriticConfig
  heads: Heads
  layer: int
  actions: Scale
  states: Scale
  losses: tuple[float, float]
  identity: str


def learn_critic(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  transitions: str,
  backbone: str,
  config: CriticConfig,
  report: Report = unreported,
) -> Learnt:
  """Reads the features of transitions once, and trains the heads on them.

  Args:
    experiment: validated and frozen here; its mesh places the backbone.
    output: new, empty, or of an earlier call with the same settings.
    transitions: folder of ``recording``.
    backbone: a run, a checkpoint or a Hugging Face folder, fine-tuned on the folder's questions.
    config: see CriticConfig.
    report: told of the updates.

  Raises:
    CheckpointError: no backbone to load.
    ConfigError: settings that cannot be, or an output of other settings.
    FloatingPointError: gradients that are not finite.
  """
  resolve(experiment)
  config.validate("critic")
  config.freeze()
  found, origin = read_transitions(transitions)
  _check_rewards(config, found)
  policy = load_policy_with_chat(backbone, experiment)
  layer = tapped_layer(config.layer, policy.model)
  settings = {
    "critic": config.to_dict(),
    "layer": layer,
    "backbone": policy.identity,
    "transitions": origin["sha256"],
  }
  directory = claim(output, settings, (FEATURES, STATE, METRICS))
  features = _features(directory / FEATURES, policy, found, layer, config.forward_rows)
  actions, states = _scales(features)
  data = Data(
    actions=jnp.asarray(actions(features["actions"])),
    states=jnp.asarray(states(features["states"])),
    next_states=jnp.asarray(states(features["next_states"])),
    rewards=jnp.asarray([one.reward for one in found], jnp.float32),
    done=jnp.asarray([one.done for one in found], jnp.float32),
  )
  critic, losses = _updated(directory, config, data, report)
  return Learnt(config, critic.heads, layer, actions, states, losses, policy.identity)


def read_critic(folder: str | os.PathLike[str]) -> Learnt:
  """The critic of a folder.

  Raises:
    ConfigError: the folder holds no critic, or one that has not learnt all its updates.
  """
  directory = pathlib.Path(folder)
  if not (directory / STATE).is_file():
    raise ConfigError(
      f"--critic={os.fspath(folder)!r} holds no critic; allowed: the output of "
      "python -m agentjax.recipes.digi_q.learn."
    )
  settings = json.loads((directory / SETTINGS).read_text())
  config = CriticConfig.from_dict(settings["critic"], "critic").freeze()
  features = _saved_features(directory / FEATURES)
  critic = _restored(directory / STATE, begin(config, features["states"].shape[1]))
  if int(critic.done) < config.steps:
    raise ConfigError(
      f"--critic={os.fspath(folder)!r} has learnt {int(critic.done)} of {config.steps} updates; "
      "let its command finish."
    )
  losses = [json.loads(line)["loss"] for line in (directory / METRICS).read_text().splitlines()]
  actions, states = _scales(features)
  return Learnt(
    config, critic.heads, settings["layer"], actions, states, (losses[0], losses[-1]),
    settings["backbone"],
  )  # fmt: skip


def _features(
  path: pathlib.Path, policy: Policy, found: Sequence[Transition], layer: int, rows: int
) -> Mapping[str, np.ndarray]:
  """Features [n, D] of actions, states and next states; a state that is none has those of its
  own."""
  if not path.exists():
    prompts = {
      "actions": [question(one.state, one.action) for one in found],
      "states": [state_prompt(one.state) for one in found],
      "next_states": [state_prompt(one.next_state or one.state) for one in found],
    }
    whole = read_features(
      policy, [p for name in _NAMES for p in prompts[name]], layer=layer, rows=rows
    )
    stream = io.BytesIO()
    np.save(stream, np.stack(np.split(whole, len(_NAMES))))
    write_atomically(path, stream.getvalue())
  return _saved_features(path)


def _saved_features(path: pathlib.Path) -> Mapping[str, np.ndarray]:
  return dict(zip(_NAMES, np.load(path), strict=True))


def _scales(features: Mapping[str, np.ndarray]) -> tuple[Scale, Scale]:
  return Scale.of(features["actions"]), Scale.of(features["states"])


def _updated(
  directory: pathlib.Path, config: CriticConfig, data: Data, report: Report
) -> tuple[Critic, tuple[float, float]]:
  """The critic after all updates, and the mean losses of the first and the last stretch."""
  path, metrics, total = directory / STATE, directory / METRICS, config.steps
  critic = _restored(path, begin(config, data.states.shape[1]))
  known = metrics.read_text().splitlines() if metrics.exists() else []
  rows = [line for line in known if json.loads(line)["updates"] <= int(critic.done)]
  report("updates", int(critic.done), total)
  while (done := int(critic.done)) < total:
    steps = min(config.keep_every, total - done)
    critic, losses = learn(config, critic, data, steps=steps)
    if skipped := int(bad_steps(critic.optimizer)):
      raise FloatingPointError(
        f"update {done + steps}: {skipped} updates in a row had no finite gradient"
      )
    rows.append(json.dumps({"updates": done + steps, "loss": float(jnp.mean(losses))}))
    write_atomically(metrics, "\n".join(rows) + "\n")  # before the state, which says how many
    write_atomically(path, serialization.to_bytes(jax.device_get(critic)))
    report("updates", done + steps, total)
  losses_of = [json.loads(line)["loss"] for line in rows]
  return critic, (losses_of[0], losses_of[-1])


def _restored(path: pathlib.Path, template: T) -> T:
  """What was saved, or the template itself if nothing was."""
  if not path.exists():
    return template
  read: Callable[[T, bytes], T] = serialization.from_bytes
  return jax.tree.map(jnp.asarray, read(template, path.read_bytes()))


def _check_rewards(config: CriticConfig, found: Sequence[Transition]) -> None:
  """A cross-entropy is of values from 0 to 1."""
  rewards = [one.reward for one in found]
  if config.loss == "cross_entropy" and not 0 <= min(rewards) <= max(rewards) <= 1:
    raise ConfigError(
      f"rewards go from {min(rewards):g} to {max(rewards):g} with critic.loss='cross_entropy'; "
      "allowed: 0 to 1, or --critic.loss=mse."
    )
