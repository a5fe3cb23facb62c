r"""Rubric rewards: a list of atomic criteria, each judged or checked by a rule, as one number.

Three ways to a number, with ``c_j`` in [0, 1] what the j-th criterion got:

* ``explicit`` (RaR, 2507.17746): ``r = sum_j w_j c_j / sum_j w_j``, every item judged alone;
* ``implicit`` (RaR): the judge sees all items at once and gives one Likert score L,
  ``r = (L - 1) / (likert - 1)``;
* ``veto_saturating``: ``r = V (sum_k W_k min(x_k / s, 1) / sum_k W_k)^p``, where V is the smallest
  c of the items with a veto, and x_k and W_k are the weighted mean and the summed weight of the
  other items of kind k. Rubric anchors (2508.12790) name these steps, veto, saturation and a
  stretch at the top, without closed forms: this one is ours, so are s and p, and their step of
  pairwise interactions is left out.

An item of kind "pitfall" names a fault. The judge is asked whether the fault is present, and ``c =
1`` if it is not. So every item adds to both sums, and r stays in [0, 1].

Items should be atomic and say what they mean: partial credit for compound criteria, implicit taken
as explicit, and matching by topic are how rubrics are gamed (2605.12474).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.config import AtLeastTwo, ConfigError, PositiveShare, Range
from agentjax.recipes.rubrics.panel import UNAVAILABLE, Combine, panel
from agentjax.rewards.graph import Scorer
from agentjax.rewards.judges import (
  Judge,
  LengthAlarm,
  Read,
  ask,
  ask_about,
  delimit,
  final_answer,
  last_json_object,
  material_notice,
  nonce,
  number_in,
  question_key,
  question_text,
)
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Message, Reward, Task, Trajectory

Kind = Literal["essential", "important", "optional", "pitfall"]
Rule = Callable[[str, str], bool]

KINDS: tuple[Kind, ...] = get_args(Kind)
RUBRIC = "rubric"  # in the metadata of a task: its items, as mappings of RubricItem's fields

# RaR's according to other papers; not checked against the paper itself.
KIND_WEIGHTS: Mapping[str, float] = {
  "essential": 1.0,
  "important": 0.7,
  "optional": 0.3,
  "pitfall": 0.9,
}


def _is_json(text: str, argument: str) -> bool:
  del argument
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


RULES: Mapping[str, Rule] = {
  "contains": lambda text, argument: argument.casefold() in text.casefold(),
  "matches": lambda text, argument: re.search(argument, text) is not None,
  "most_words": lambda text, argument: len(text.split()) <= int(argument),
  "least_words": lambda text, argument: len(text.split()) >= int(argument),
  "is_json": _is_json,
}


@dataclasses.dataclass(frozen=True)
class RubricItem:
  """One criterion.

  Attributes:
    text: what must hold, or the fault of a pitfall; one thing only.
    kind: decides the weight if none is given.
    weight: > 0, or None for ``KIND_WEIGHTS``.
    veto: whether failing it nulls the total of "veto_saturating".
    verify: "judge", or the name of a rule in ``RULES`` (or of your own).
    argument: of the rule.
  """

  text: str
  kind: Kind = "essential"
  weight: float | None = None
  veto: bool = False
  verify: str = "judge"
  argument: str = ""

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ValueError(f"kind={self.kind!r} of {self.text!r}; allowed: {', '.join(KINDS)}.")
    if not self.text.strip():
      raise ValueError("a criterion needs a text.")
    if self.weight is not None and not self.weight > 0:
      raise ValueError(f"weight={self.weight} of {self.text!r}; allowed: > 0 or None.")

  @property
  def own_weight(self) -> float:
    """The weight given, or that of the kind."""
    return KIND_WEIGHTS[self.kind] if self.weight is None else self.weight


@dataclasses.dataclass(frozen=True)
class Rubric:
  """The criteria of a task."""

  items: tuple[RubricItem, ...]

  def __post_init__(self) -> None:
    if not self.items:
      raise ValueError("a rubric needs at least one item.")

  @classmethod
  def from_list(cls, rows: Sequence[Mapping[str, Any]]) -> Rubric:
    """Of plain mappings, as they are in a task's metadata.

    Raises:
      ValueError: no item, an unknown field, or a value that ``RubricItem`` refuses.
    """
    fields = [f.name for f in dataclasses.fields(RubricItem)]
    for i, row in enumerate(rows):
      if unknown := sorted(set(row) - set(fields)):
        raise ValueError(f"item {i} has {', '.join(unknown)}; allowed: {', '.join(fields)}.")
    return cls(tuple(RubricItem(**row) for row in rows))

  @property
  def names(self) -> tuple[str, ...]:
    """Of the items, for the log: kind and place, so that many rubrics share few names."""
    return tuple(f"{item.kind}_{i}" for i, item in enumerate(self.items))


@dataclasses.dataclass(unsafe_hash=True)
class RubricConfig(ScorerConfig):
  """The part "rubric": how criteria become a reward, and who judges; see the module.

  Attributes:
    aggregate: the way to one number.
    combine: how the verdicts of a panel on an item (for "implicit": on the whole) are combined.
    likert: the best grade of "implicit"; the worst is 1.
    readable: share of the weight that must have a verdict; the rest is left out of both sums, and
      with less the reward is invalid. Ours.
    saturation: s, the share of a kind's weight from where more of it adds nothing. Ours.
    stretch: p >= 1; above 1 the differences between good answers grow. Ours.
    judges: endpoints, a panel; none where all criteria have rules.
    seed: of the judges' randomness, with the address of what they judge.
  """

  aggregate: Literal["explicit", "implicit", "veto_saturating"] = "explicit"
  combine: Combine = "median"
  likert: AtLeastTwo = 10
  readable: PositiveShare = 0.5
  saturation: PositiveShare = 0.8
  stretch: Annotated[float, Range(1)] = 1.5
  judges: tuple[HttpJudgeConfig, ...] = ()
  seed: int = 0

  def build(self, sandboxes: Sandboxes) -> Scorer:
    return RubricScorer([HttpJudge(judge) for judge in self.judges], self, seed=self.seed)


def explicit(rubric: Rubric, met: Sequence[Reward], *, readable: float = 0.5) -> Reward:
  """``sum w c / sum w`` over the items with a verdict.

  Args:
    rubric: R items.
    met: c of each, in [0, 1] (of a pitfall: 1 where the fault is absent), or invalid.
    readable: see RubricConfig.
  """
  pairs = list(zip(rubric.items, met, strict=True))
  total = sum(item.own_weight for item, _ in pairs)
  read = [(item.own_weight, c.value) for item, c in pairs if c.value is not None]
  weight = sum(w for w, _ in read)
  if weight < readable * total or not read:
    return Reward.invalid(f"criteria of weight {weight:g} of {total:g} have a verdict")
  return Reward(sum(w * c for w, c in read) / weight)


def veto_saturating(rubric: Rubric, met: Sequence[Reward], config: RubricConfig) -> Reward:
  """``V (sum_k W_k min(x_k / s, 1) / sum_k W_k)^p``; see the module. Arguments as in ``explicit``.

  Invalid if an item with a veto has no verdict. With vetoes only the reward is V.
  """
  pairs = list(zip(rubric.items, met, strict=True))
  vetoes = [c for item, c in pairs if item.veto]
  unread = next((c for c in vetoes if c.value is None), None)
  if unread is not None:
    return Reward.invalid(f"a criterion with a veto has no verdict: {unread.reason}")
  veto = min((c.value for c in vetoes if c.value is not None), default=1.0)
  rest = [(item, c) for item, c in pairs if not item.veto]
  if veto == 0 or not rest:
    return Reward(veto)
  overall = explicit(
    Rubric(tuple(i for i, _ in rest)), [c for _, c in rest], readable=config.readable
  )
  if not overall.valid:
    return overall
  top = bottom = 0.0
  for kind in KINDS:
    of_kind = [(i.own_weight, c.value) for i, c in rest if i.kind == kind and c.value is not None]
    weight = sum(w for w, _ in of_kind)
    if weight:
      share = sum(w * c for w, c in of_kind) / weight
      top += weight * min(share / config.saturation, 1.0)
      bottom += weight
  return Reward(veto * (top / bottom) ** config.stretch)


class UnreadableVerdictError(ValueError):
  """Judges answered, and their answers hold no verdict."""


class RubricScorer:
  """Scores the final answer by the rubric in ``task.metadata["rubric"]``, or by one for all tasks.

  Each item is logged as the part ``rubric/KIND_I``. No answer scores 0. Where judges were
  unavailable the reward is invalid, never 0. Where they answered and none of it can be read, the
  scorer raises ``UnreadableVerdictError``, and the reward graph tries the judges on an empty answer
  (``rewards.graph``): if they can be read there, the answer is to blame.

  Args:
    judges: a panel; one is enough, none where all items have rules.
    config: see RubricConfig.
    rubric: of tasks that have none of their own.
    rules: by name, for ``RubricItem.verify``.
    read: what of an episode is judged.
    seed: with task and sample it addresses the judges' randomness.
    alarm: gets every score with its answer's length.
  """

  def __init__(
    self,
    judges: Sequence[Judge],
    config: RubricConfig,
    *,
    rubric: Rubric | None = None,
    rules: Mapping[str, Rule] = RULES,
    read: Read = final_answer,
    seed: int,
    alarm: LengthAlarm | None = None,
  ):
    config.validate()
    self._judges, self._config, self._rubric = tuple(judges), config, rubric
    self._rules, self._read, self._seed = dict(rules), read, seed
    self._alarm = alarm or LengthAlarm("rubric")

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    answer = self._read(trajectory, task)
    if answer is None:
      return Reward(0.0)
    rubric = self._rubric_of(task)
    key = question_key(self._seed, *trajectory.address)
    question = task.prompt
    said: Sequence[Reward] = ()
    if self._config.aggregate == "implicit":
      reward = await self._panel(
        lambda judge: grade(judge, rubric, question, answer, likert=self._config.likert, key=key)
      )
    else:
      met = await asyncio.gather(
        *(self._check(i, item, question, answer, key) for i, item in enumerate(rubric.items))
      )
      said = met
      for name, value in zip(rubric.names, met, strict=True):
        trajectory.reward_parts[f"{RUBRIC}/{name}"] = value
      if self._config.aggregate == "explicit":
        reward = explicit(rubric, met, readable=self._config.readable)
      else:
        reward = veto_saturating(rubric, met, self._config)
    if reward.value is not None:
      self._alarm.note(reward.value, len(answer), task.id)
    elif not any(UNAVAILABLE in (one.reason or "") for one in (reward, *said)):
      raise UnreadableVerdictError(reward.reason)
    return reward

  def _rubric_of(self, task: Task) -> Rubric:
    rows = task.metadata.get(RUBRIC)
    if rows is not None:
      return Rubric.from_list(rows)
    if self._rubric is None:
      raise ConfigError(
        f"task {task.id} of {task.source!r} has no metadata[{RUBRIC!r}]; give it a list of items, "
        "or the scorer a rubric for all tasks."
      )
    return self._rubric

  async def _check(
    self, place: int, item: RubricItem, question: Sequence[Message], answer: str, key: int
  ) -> Reward:
    """c of one item: 1 is good, also of a pitfall."""
    if item.verify == "judge":
      return await self._panel(
        lambda judge: meets(judge, item, question, answer, key=question_key(key, place))
      )
    if item.verify not in self._rules:
      allowed = ", ".join(["judge", *self._rules])
      raise ConfigError(f"verify={item.verify!r} of {item.text!r}; allowed: {allowed}.")
    held = self._rules[item.verify](answer, item.argument)
    return Reward(float(held != (item.kind == "pitfall")))

  async def _panel(self, question: Callable[[Judge], Any]) -> Reward:
    if not self._judges:
      raise ConfigError(
        "the rubric has items to be judged and there is no judge; give at least one."
      )
    return await panel(self._judges, question, self._config.combine)


async def meets(
  judge: Judge, item: RubricItem, question: Sequence[Message], answer: str, *, key: int
) -> Reward:
  """c by one judge: 1 where the criterion holds of the answer (of a pitfall: where the fault is not
  there), else 0; invalid where the reply cannot be read.

  A pitfall is inverted here, before the panel, so that the panel's minimum is always the
  pessimistic one.
  """
  what = "fault" if item.kind == "pitfall" else "criterion"
  asked = (
    f"Is the following {what} present in the answer? Judge this one point only, by what the answer "
    f"says and not by what it may mean.\n\n{what.capitalize()}: {item.text}\n\n"
    'Reply with one JSON object: {"reason": "one sentence", "present": true or false}'
  )
  reply = await ask(judge, _messages(question, answer, asked, key), key=key)
  present = (last_json_object(reply) or {}).get("present")
  if not isinstance(present, bool):
    return Reward.invalid("the judge's verdict on a criterion cannot be read")
  return Reward(float(present != (item.kind == "pitfall")))


async def grade(
  judge: Judge, rubric: Rubric, question: Sequence[Message], answer: str, *, likert: int, key: int
) -> Reward:
  """``(L - 1) / (likert - 1)`` of the judge's one grade L for all items together."""
  lines = [
    f"{i}. ({item.kind}, weight {item.own_weight:g}) {item.text}"
    for i, item in enumerate(rubric.items, 1)
  ]
  asked = (
    f"Grade the answer from 1 (worst) to {likert} (best) by these criteria together; a pitfall is "
    "a fault that the answer should not have.\n\n" + "\n".join(lines) + "\n\n"
    f'Reply with one JSON object: {{"reason": "one sentence", "grade": 1 to {likert}}}'
  )
  reply = await ask(judge, _messages(question, answer, asked, key), key=key)
  value = number_in((last_json_object(reply) or {}).get("grade"), 1, likert)
  if value is None:
    return Reward.invalid("the judge's grade cannot be read")
  return Reward((value - 1) / (likert - 1))


def _messages(
  question: Sequence[Message], answer: str, asked: str, key: int
) -> tuple[Message, ...]:
  shown = question_text(question)
  mark = nonce(key, shown, answer)
  return (
    Message("system", "You judge answers strictly and fairly. " + material_notice(mark)),
    ask_about(
      question,
      f"{delimit('question', shown, mark)}\n\n{delimit('answer', answer, mark)}\n\n{asked}",
    ),
  )
