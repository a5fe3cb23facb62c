"""Transitions: the turns of stored episodes, in words.

A transition has the text of a state, the action, a reward, the state after it, and whether the
episode ended. The text is what the policy was shown and what it wrote; it stands in the place of
the source's screenshots.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.recipes.digi_q.conversations import ConversationReader
from agentjax.recipes.digi_q.settings import RecordConfig
from agentjax.text.chat import Chat
from agentjax.text.tool_calls import DescribedTool
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.messages import message_to_json
from agentjax.trajectory.record import Message, Segment, Task, Trajectory

YES, NO = "yes", "no"
_QUESTION = f"Will this action change what is seen next? Answer {YES} or {NO}."


@dataclasses.dataclass(frozen=True)
class Transition:
  """One turn of an episode.

  Attributes:
    id: number of the transition.
    task: id of the task.
    state: what was seen before the turn. action: what the policy wrote.
    reward: that of the episode at its last turn, 0 before.
    next_state: what was seen after it; None if the episode ended.
    changed: whether the observation after it differs from that before; None if there is none.
    ids: tokens that the policy had before the turn.
    messages: the same as rows of demonstrations have it, without loss; None if it cannot be
      written.
  """

  id: int
  task: int
  state: str
  action: str
  reward: float
  next_state: str | None
  changed: bool | None
  ids: tuple[int, ...]
  messages: tuple[Mapping[str, Any], ...] | None

  @property
  def done(self) -> bool:
    """Whether the episode ended with this turn."""
    return self.next_state is None

  def to_row(self) -> dict[str, Any]:
    """Plain JSON."""
    return dataclasses.asdict(self)

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> Transition:
    """Inverse of ``to_row``."""
    values = {field.name: row[field.name] for field in dataclasses.fields(cls)}
    messages = values["messages"]
    return cls(
      **{
        **values,
        "ids": tuple(values["ids"]),
        "messages": None if messages is None else tuple(messages),
      }
    )


class TransitionReader:
  """Makes transitions of episodes.

  Args:
    chat: of the policy that played.
    config: see RecordConfig.
  """

  def __init__(self, chat: Chat, config: RecordConfig):
    self._chat, self._config = chat, config
    self._markup = chat.reserved_ids.union(chat.stop_ids)
    self._conversations = ConversationReader(chat)

  def read(
    self, episode: Trajectory, task: Task, tools: Sequence[DescribedTool], first_id: int
  ) -> list[Transition]:
    """The turns of an episode in their order; none of one that ``refusal`` names.

    Args:
      episode: of one agent.
      task: of the episode.
      tools: that were offered.
      first_id: id of the first transition.
    """
    if self.refusal(episode) is not None:
      return []
    heard, drawn = self._turns(episode)
    reward = episode.reward.value
    assert reward is not None
    texts = [self._said(segments) for segments in heard]
    actions = [self.action_text(ids) for ids in drawn]
    states = [self._state(texts, actions, number) for number in range(len(drawn))]
    seen = [self._compared(text) for text in texts]
    histories = self._conversations.histories(heard, drawn, task, tools)
    before: list[int] = []
    found = []
    for number, ids in enumerate(drawn):
      before += [i for s in heard[number] for i in s.token_ids.tolist()]
      last = number + 1 == len(drawn)
      history = histories[number]
      found.append(
        Transition(
          id=first_id + number,
          task=episode.task_id,
          state=states[number],
          action=actions[number],
          reward=reward if last else 0.0,
          next_state=None if last else states[number + 1],
          changed=None if last else seen[number] != seen[number + 1],
          ids=tuple(before),
          messages=None if history is None else tuple(_without_loss(m) for m in history),
        )
      )
      before += ids
    return found

  def refusal(self, episode: Trajectory) -> str | None:
    """Why an episode has no transitions; None if it has."""
    if not episode.usable:
      return "no valid reward"
    if episode.agents:
      return "several agents"
    if len(token_paths(episode)) != 1:
      return "a history that was rewritten"
    if not any(s.sampled.any() for s in episode.segments):
      return "no turn"
    return None

  def action_text(self, ids: Sequence[int]) -> str:
    """What the policy wrote, without markup."""
    return self._chat.tokenizer.decode([i for i in ids if i not in self._markup]).strip()

  def _turns(self, episode: Trajectory) -> tuple[list[list[Segment]], list[list[int]]]:
    """What was heard before each turn, and the ids of the turn."""
    (path,) = token_paths(episode)
    segments = [episode.segments[i] for i in path.segments]
    heard: list[list[Segment]] = []
    drawn: list[list[int]] = []
    if segments[0].sampled.any():
      heard.append([])
    for own, run in itertools.groupby(segments, key=lambda s: bool(s.sampled.any())):
      if own:
        drawn.append([i for s in run for i in s.token_ids.tolist()])
      else:
        heard.append(list(run))
    return heard[: len(drawn)], drawn  # nothing follows what is heard after the last turn

  def _said(self, segments: Sequence[Segment]) -> str:
    """The texts of others."""
    spoken = [s for s in segments if s.owner != "assistant"]
    texts = (
      self._chat.tokenizer.decode([i for i in s.token_ids.tolist() if i not in self._markup])
      for s in spoken
    )
    return "\n".join(text for t in texts if (text := t.strip("\n")))

  def _state(self, heard: Sequence[str], actions: Sequence[str], number: int) -> str:
    shown = self._config.shown_turns
    first = 0 if shown is None else max(0, number - shown)
    turns = [f"> {actions[i]}\n{heard[i + 1]}" for i in range(first, number)]
    return "\n".join([heard[0], *turns])

  def _compared(self, observation: str) -> str:
    if not self._config.compare:
      return observation
    matches = list(re.finditer(self._config.compare, observation))
    return matches[-1].group() if matches else observation


def question(state: str, action: str) -> tuple[Message, ...]:
  """Asks the backbone about an action; its features are read where it would answer."""
  return (Message("user", f"{state}\n\nAction: {action}\n{_QUESTION}"),)


def state_prompt(state: str) -> tuple[Message, ...]:
  """Shows the backbone a state alone."""
  return (Message("user", state),)


def representation_rows(transitions: Sequence[Transition]) -> list[dict[str, Any]]:
  """Conversations for the supervised stage of the backbone: does the action change anything?

  The last turn of an episode has no observation after it, and so no row.
  """
  rows = []
  for one in transitions:
    if one.changed is not None:
      answer = YES if one.changed else NO
      messages = (*question(one.state, one.action), Message("assistant", answer))
      rows.append({"messages": [message_to_json(m) for m in messages], "answer": answer})
  return rows


def _without_loss(message: Message) -> dict[str, Any]:
  """As a row of demonstrations has it."""
  weight = 0.0 if message.role == "assistant" else 1.0
  return message_to_json(dataclasses.replace(message, weight=weight))
