"""Settings of episodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from agentjax.config import AtLeastTwo, Config, PositiveFloat, PositiveInt
from agentjax.names import Adopted, Choice, check_callable, wrong
from agentjax.rewards.graph import RewardGraph, Scorer

if TYPE_CHECKING:
  from agentjax.rollout.group import Sampler
  from agentjax.rollout.program import ContextManager, EpisodeProgram


@dataclasses.dataclass(unsafe_hash=True)
class SamplerConfig(Choice):
  """Settings of how the episodes of a group are made.

  Attributes:
    scorers: parts of the reward that the sampler brings; all must be in ``config.reward.parts``.
  """

  group = "agentjax.samplers"
  adopts = "a Sampler, or what makes one without arguments"
  scorers: ClassVar[Mapping[str, Scorer]] = {}

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "independent": "agentjax.rollout.config:IndependentConfig",
      "oversample": "agentjax.rollout.samplers:OversampleConfig",
      "branch": "agentjax.recipes.arpo:BranchConfig",
      "monte_carlo": "agentjax.recipes.monte_carlo:MonteCarloConfig",
      "tree_search": "agentjax.recipes.tree_search:TreeConfig",
    }

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    made = found() if callable(found) else found
    if not hasattr(made, "sample"):
      raise wrong(name, path, made, cls.adopts)
    return OwnSampler(name, made)  # type: ignore[return-value]

  def check_group(self, group_size: int, path: str) -> None:
    """Raises ConfigError if a group cannot have this size; ``path`` is that of the rollout."""

  def build(self, rewards: RewardGraph) -> Sampler | None:
    """The sampler of a run; None where episodes are independent.

    Args:
      rewards: the run's reward graph.

    Raises:
      ConfigError: rewards that do not suit the sampler.
    """
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class IndependentConfig(SamplerConfig):
  """Every episode from the start."""

  def build(self, rewards: RewardGraph) -> None:
    return None


@dataclasses.dataclass(unsafe_hash=True)
class OwnSampler(Adopted, SamplerConfig):
  """A sampler without settings, named by ``module:attribute``."""


@dataclasses.dataclass(unsafe_hash=True)
class ContextConfig(Choice):
  """Settings of a context manager, which may rewrite an agent's history between its turns."""

  group = "agentjax.contexts"
  adopts = "an async function (episode, observation) -> Observation | None"

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    check_callable(found, f"{path}={name!r}", cls.allowed(), arguments=2)
    return OwnContext(name, found)  # type: ignore[return-value]

  def build(self) -> ContextManager:
    """The context manager of a run."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class OwnContext(Adopted, ContextConfig):
  """A context manager without settings, named by ``module:attribute``."""


@dataclasses.dataclass(unsafe_hash=True)
class ProgramConfig(Choice):
  """Settings of what happens in an episode."""

  group = "agentjax.programs"
  adopts = "an async function of an Episode"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {"tools": "agentjax.rollout.config:ToolLoopConfig"}

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    check_callable(found, f"{path}={name!r}", cls.allowed())
    return OwnProgram(name, found)  # type: ignore[return-value]

  def build(self) -> EpisodeProgram:
    """The program of a run."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class ToolLoopConfig(ProgramConfig):
  """Agents act and the environment answers, until one of them or a limit ends the episode.

  Attributes:
    context: context manager: an async function of the episode and the new observation, called
      before an agent acts again. It returns the messages of the whole new history, or None to
      append the observation. Every rewrite begins a branch of the record (``Episode.rewrite``).
  """

  context: ContextConfig | None = None

  def build(self) -> EpisodeProgram:
    from agentjax.rollout.program import tool_episode  # it imports this module

    if self.context is None:
      return tool_episode
    return functools.partial(tool_episode, context=self.context.build())


@dataclasses.dataclass(unsafe_hash=True)
class OwnProgram(Adopted, ProgramConfig):
  """A program without settings, named by ``module:attribute``."""


@dataclasses.dataclass(unsafe_hash=True)
class RolloutConfig(Config):
  """How episodes run. All defaults are ours; no paper fixes them.

  Attributes:
    group_size: episodes a task gets in one step.
    max_turns: model calls in an episode; one that needs more is truncated.
    max_tokens_per_turn: tokens drawn in one model call.
    max_total_tokens: tokens of the whole episode, prompt and observations included; at most the
      engine's max_length and the trainer's row length.
    episode_timeout: seconds the environment of one episode may take in all, tools included; then
      the episode is truncated. The policy's own turns are bounded by their tokens and do not count,
      so waiting for a slot of the engine does not truncate an episode.
    environment_timeout: seconds one reset, step or close of an environment may take; then the
      episode is an environment error. It must exceed the time-outs of the tools together.
    reward_timeout: seconds the scoring of one trajectory or group may take; then the reward is
      invalid.
    cancel_grace: seconds an environment that is cancelled may take to stop before it is abandoned.
    concurrency: episodes that run at the same time; with more episodes than slots the device is
      busy while some wait for tools.
    answer: which part of the last turn of a question is the answer. "marked": the line after
      ``####``; "text": the whole turn.
    grammar: what the policy may write. "none", anything; "tool_calls", free text and calls that are
      well formed, with arguments that satisfy the schema of an offered tool. The recorded log-probs
      stay those of the unmasked policy. Needs ``engine.grammar_states``.
    sampler: how a group is made, by name. "independent": every episode from the start;
      "oversample": the first of more; "branch": some continue another from a turn with a high
      entropy (ARPO, AEPO); "monte_carlo": independent, and every turn is rewarded by completions
      from before and after it; "tree_search": the best leaves of a search; or "module:attribute" of
      your own. Evaluations are always independent.
    program: what happens in an episode, by name: "tools", the loop of actions and answers, or an
      async function of an ``Episode`` of your own. Evaluations play it as well.
    rotate_seats: whether the players of several seats (``config.seats``) change places, one agent
      on each time: "never", with every further "sample" of a group, or with every "step".
  """

  group_size: PositiveInt = 8
  max_turns: PositiveInt = 8
  max_tokens_per_turn: PositiveInt = 128
  max_total_tokens: AtLeastTwo = 512
  episode_timeout: PositiveFloat = 600.0
  environment_timeout: PositiveFloat = 120.0
  reward_timeout: PositiveFloat = 120.0
  cancel_grace: PositiveFloat = 1.0
  concurrency: PositiveInt = 64
  answer: Literal["marked", "text"] = "marked"
  grammar: Literal["none", "tool_calls"] = "none"
  sampler: SamplerConfig = dataclasses.field(default_factory=IndependentConfig)
  program: ProgramConfig = dataclasses.field(default_factory=ToolLoopConfig)
  rotate_seats: Literal["never", "sample", "step"] = "never"

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    self.sampler.check_group(self.group_size, path)
