"""The working window of an agent: a new task begins a new history, a long one is summarised.

Every rewritten history is a branch of the record (``Episode.rewrite``), so what was drawn before is
still trained, each token once. The summary is a turn of the agent itself, at the end of the old
branch: it is drawn, recorded and trained as any other.
"""

from __future__ import annotations

import dataclasses
import itertools

from agentjax.config import NonNegativeInt, check
from agentjax.recipes.semaclaw.team import NewTaskObservation
from agentjax.rollout.config import ContextConfig
from agentjax.rollout.program import ContextManager, Episode
from agentjax.trajectory.record import Message
from agentjax.world.environment import Observation

ASKED = "Your memory is nearly full. Sum up the conversation so far: what is asked, what is known."
_OPENING = "<summary>\n"


@dataclasses.dataclass(unsafe_hash=True)
class WindowConfig(ContextConfig):
  """Chosen by ``rollout.program.context``. The figures are ours.

  Attributes:
    tokens: an agent that goes on after a turn of its own, with a history at least this long, is
      asked for a summary. It then goes on from its prompt, the summary and the latest messages. 0
      never asks. The window needs room below ``rollout.max_total_tokens`` for those messages, the
      question and the summary.
    fresh_tasks: a worker of a team begins each task with its prompt alone.
  """

  tokens: NonNegativeInt = 0
  fresh_tasks: bool = True

  def validate(self, path: str = "config.rollout.program.context") -> None:
    super().validate(path)
    used = self.tokens > 0 or self.fresh_tasks
    check(used, f"{path}.tokens", self.tokens, "> 0, or fresh_tasks=True")

  def build(self) -> ContextManager:
    return self.rewrite

  async def rewrite(self, episode: Episode, observation: Observation) -> Observation | None:
    """The new history of whoever acts next; None where it goes on as it is."""
    if isinstance(observation, NewTaskObservation) and self.fresh_tasks:
      return observation
    seat = episode.seat
    if not self.tokens or observation.next != seat.agent or seat.length < self.tokens:
      return None
    prompt = tuple(itertools.takewhile(_is_prompt, seat.said))
    asked = (*observation.messages, Message("user", ASKED))
    await episode.observe(dataclasses.replace(observation, messages=asked))
    summary = (await episode.act()).text.strip()
    latest = (Message.of("user", *(m.parts or (m.content,))) for m in observation.messages)
    history = (*prompt, Message("user", f"{_OPENING}{summary}\n</summary>"), *latest)
    return Observation(history, next=observation.next)


def _is_prompt(message: Message) -> bool:
  """Whether a message at the beginning of a history is neither a turn nor an earlier summary."""
  return message.role in ("system", "user") and not message.content.startswith(_OPENING)
