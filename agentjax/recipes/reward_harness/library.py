"""RewardHarness (2605.08703): a judge gets better without training: its library of skills and tools
evolves.

A frozen judge compares answers with a library of skills (rubrics in words) and tools (prompts of
sub-judges that answer in JSON), of which a router picks those for a question. Per iteration the
judge runs on the training demonstrations, an analyser reads how it came to wrong verdicts and
proposes edits, and they are tested on held-out demonstrations:

* phase A applies the edits of skills, phase B those of tools; each is kept iff the validation
  accuracy is at least the best so far less a tolerance (.075), else the library is rolled back;
* before phase B a new tool must answer in valid JSON on 80 % of 20 samples, and may be repaired
  three times;
* phase C, every 50 iterations, leaves one entry out at a time and removes it if the accuracy
  without it is not lower.

The result is the library with the best validation accuracy. Demonstrations are used in both orders,
so that a preference for a position does not help. All models are callables of the caller. The same
key gives the same run. The state is JSON, so an interrupted run can continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Self

from agentjax.config import Config, NonNegativeInt, PositiveInt, Share
from agentjax.rewards.judges import last_json_object, number_in, question_key

EntryKind = Literal["skill", "tool"]
Choice = Literal["A", "B", "tie"]

_OTHER: Mapping[Choice, Choice] = {"A": "B", "B": "A", "tie": "tie"}
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
  """A skill or a tool: a name, unique among its kind, and a text."""

  kind: EntryKind
  name: str
  text: str


@dataclasses.dataclass(frozen=True)
class Library:
  """The skills and tools of the judge."""

  entries: tuple[Entry, ...] = ()

  @classmethod
  def from_dict(cls, values: Any) -> Library:
    """Inverse of ``dataclasses.asdict``.

    Raises:
      ValueError: it is not of that form.
    """
    try:
      entries = tuple(Entry(**entry) for entry in values["entries"])
    except (KeyError, TypeError) as error:
      raise ValueError(f"no list of entries: {error}") from error
    for entry in entries:
      texts = isinstance(entry.name, str) and isinstance(entry.text, str)
      if entry.kind not in ("skill", "tool") or not texts:
        raise ValueError(f"{entry} is neither a skill nor a tool in words")
    return cls(entries)

  def of(self, kind: EntryKind) -> tuple[Entry, ...]:
    """All skills, or all tools."""
    return tuple(entry for entry in self.entries if entry.kind == kind)

  def without(self, entry: Entry) -> Library:
    """The library less one entry."""
    return Library(tuple(e for e in self.entries if (e.kind, e.name) != (entry.kind, entry.name)))

  def with_entry(self, entry: Entry) -> Library:
    """The library with an entry added, or replaced if the name exists."""
    known = [(e.kind, e.name) for e in self.entries]
    if (entry.kind, entry.name) not in known:
      return Library((*self.entries, entry))
    at = known.index((entry.kind, entry.name))
    return Library((*self.entries[:at], entry, *self.entries[at + 1 :]))


@dataclasses.dataclass(frozen=True)
class Edit:
  """A change of the library. Adding a name that is there updates it; deleting one that is not does
  nothing."""

  action: Literal["add", "update", "delete"]
  entry: Entry

  def apply(self, library: Library) -> Library:
    """The library after it."""
    if self.action == "delete":
      return library.without(self.entry)
    return library.with_entry(self.entry)


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """Two answers and which is better. ``content`` is what the judge is shown, as JSON; pairs of one
  ``group`` compare the same K answers."""

  id: int
  content: Mapping[str, Any]
  first: str
  second: str
  label: Choice
  group: int | None = None

  def swapped(self) -> Demonstration:
    """The same in the other order."""
    return dataclasses.replace(self, first=self.second, second=self.first, label=_OTHER[self.label])


@dataclasses.dataclass(frozen=True)
class Judged:
  """The judge's choice, and how it came to it: entries used, answers of tools, its own words."""

  choice: Choice
  chain: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What the judge chose on a demonstration, and how."""

  demonstration: Demonstration
  choice: Choice
  chain: str = ""

  @property
  def right(self) -> bool:
    return self.choice == self.demonstration.label


@dataclasses.dataclass(frozen=True)
class Analysis:
  """The input of an analyser.

  Attributes:
    library: the present one.
    outcomes: on the training demonstrations, in both orders.
    wants_tool: there are few tools, and at least one is to be proposed.
    key: addresses its randomness.
  """

  library: Library
  outcomes: tuple[Outcome, ...]
  wants_tool: bool
  key: int


Judgement = Callable[[Library, Demonstration, int], Awaitable[Judged]]
Propose = Callable[[Analysis], Awaitable[Sequence[Edit]]]
Probe = Callable[[Entry, Demonstration, int], Awaitable[str]]
Repair = Callable[[Entry, Sequence[str], int], Awaitable[Entry]]


@dataclasses.dataclass(unsafe_hash=True)
class HarnessConfig(Config):
  """Attributes are those of the source, but for ``concurrency``.

  Attributes:
    iterations: how many at most.
    tolerance: an edit is kept at a validation accuracy of the best so far less this.
    tools: while there are fewer, the analyser is asked for one.
    probes, valid_share, repairs: samples that a new tool is tried on, the share that must be valid
      JSON, and how often it may be repaired.
    ablate_every: iterations between ablations.
    concurrency: questions under way at a time. Ours.
  """

  iterations: PositiveInt = 5
  tolerance: Share = 0.075
  tools: NonNegativeInt = 3
  probes: PositiveInt = 20
  valid_share: Share = 0.8
  repairs: NonNegativeInt = 3
  ablate_every: PositiveInt = 50
  concurrency: PositiveInt = 16


@dataclasses.dataclass(frozen=True)
class HarnessState:
  """A run between two iterations.

  Attributes:
    iteration: iterations done; 0 has measured the empty library, None nothing.
    library: the present one. accuracy: on validation, when it was last kept.
    best, best_accuracy: the one to use.
    history: one entry a phase: iteration, phase, accuracy, kept, and what else it says.
  """

  iteration: int | None = None
  library: Library = Library()
  accuracy: float = 0.0
  best: Library = Library()
  best_accuracy: float = 0.0
  history: tuple[Mapping[str, Any], ...] = ()

  def to_json(self) -> str:
    """The state as text."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, sort_keys=True)

  @classmethod
  def from_json(cls, text: str) -> Self:
    """Inverse of ``to_json``.

    Raises:
      ValueError: another format.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
      raise ValueError(f"the state of a harness has format {_FORMAT}; this text has another.")
    for name in ("library", "best"):
      values[name] = Library.from_dict(values[name])
    return cls(**{**values, "history": tuple(values["history"])})


def split(
  demonstrations: Sequence[Demonstration], *, key: int, train_share: float = 0.6
) -> tuple[list[Demonstration], list[Demonstration]]:
  """(training, validation), groups kept whole; the source takes 60 and 40 of 100.

  Raises:
    ValueError: one of the two would be empty.
  """

  def unit(d: Demonstration) -> tuple[str, int]:
    return ("id", d.id) if d.group is None else ("group", d.group)

  order = sorted({unit(d) for d in demonstrations}, key=lambda u: question_key(key, *u))
  chosen = set(order[: round(train_share * len(order))])
  train = [d for d in demonstrations if unit(d) in chosen]
  validation = [d for d in demonstrations if unit(d) not in chosen]
  if not train or not validation:
    raise ValueError(
      f"{len(order)} demonstrations or groups at train_share={train_share} leave one side empty."
    )
  return train, validation


def accuracy(outcomes: Sequence[Outcome]) -> float:
  """Share of right ones. A question that is asked several times counts once, and is right iff all
  answers are right.

  That is: both orders of a demonstration, and all C(K, 2) pairs of a K-way group.
  """
  if not outcomes:
    raise ValueError("an accuracy needs at least one outcome.")
  units: dict[tuple[str, int], bool] = {}
  for outcome in outcomes:
    d = outcome.demonstration
    unit = ("id", d.id) if d.group is None else ("group", d.group)
    units[unit] = units.get(unit, True) and outcome.right
  return sum(units.values()) / len(units)


@dataclasses.dataclass(frozen=True)
class SubAgentVerdict:
  """A frozen judge's answer: a preference, and two grades from 1 to 4 for each answer."""

  preference: Choice = "tie"
  instruction: tuple[float, float] = (2.0, 2.0)
  quality: tuple[float, float] = (2.0, 2.0)


def read_sub_agent(reply: str) -> SubAgentVerdict:
  """Reads the JSON within ``<answer>``; what can't be read is a tie with all grades 2."""
  body = reply.rpartition("<answer>")[2].partition("</answer>")[0]
  found = last_json_object(body) or {}
  choice: Any = found.get("preference")
  grades = [
    number_in(found.get(f"score_{letter}_{what}"), 1, 4)
    for what in ("instruction", "quality")
    for letter in "AB"
  ]
  if choice not in ("A", "B", "tie") or any(g is None for g in grades):
    return SubAgentVerdict()
  a, b, c, d = (float(g) for g in grades if g is not None)
  return SubAgentVerdict(choice, (a, b), (c, d))


class Harness:
  """The evolution over frozen models.

  Args:
    train, validation: demonstrations, see ``split``.
    judge: (library, demonstration, key) -> its choice, and how it came to it. A router that picks
      entries is part of it.
    propose: the analyser.
    probe: (tool, demonstration, key) -> what the tool answers.
    repair: (tool, answers that were no JSON, key) -> the tool mended.
    config: see HarnessConfig.
    key: addresses all randomness, which the callables are given as keys.
  """

  def __init__(
    self,
    train: Sequence[Demonstration],
    validation: Sequence[Demonstration],
    *,
    judge: Judgement,
    propose: Propose,
    probe: Probe,
    repair: Repair,
    config: HarnessConfig,
    key: int,
  ):
    config.validate()
    self._train = [d for one in train for d in (one, one.swapped())]
    self._validation = list(validation)
    self._judge, self._propose, self._probe, self._repair = judge, propose, probe, repair
    self._config, self._key = config, key

  async def evolve(
    self,
    state: HarnessState | None = None,
    *,
    save: Callable[[HarnessState], None] = lambda state: None,
  ) -> HarnessState:
    """Runs to ``config.iterations``, from ``state`` on; ``save`` is called after each iteration."""
    state = state or HarnessState()
    if state.iteration is None:
      measured = await self._measure(state.library)
      note = {"iteration": 0, "phase": "empty", "accuracy": measured, "kept": True}
      state = HarnessState(0, Library(), measured, Library(), measured, (note,))
      save(state)
    assert state.iteration is not None
    for iteration in range(state.iteration + 1, self._config.iterations + 1):
      state = dataclasses.replace(await self._iterate(state, iteration), iteration=iteration)
      save(state)
    return state

  async def _iterate(self, state: HarnessState, iteration: int) -> HarnessState:
    key = question_key(self._key, "iteration", iteration)
    outcomes = await self._run(state.library, self._train)
    wants_tool = len(state.library.of("tool")) < self._config.tools
    edits = await self._propose(Analysis(state.library, tuple(outcomes), wants_tool, key))
    skills = [edit for edit in edits if edit.entry.kind == "skill"]
    state = await self._try(state, skills, iteration, "skills", {"train": accuracy(outcomes)})
    tools, refused = await self._checked([e for e in edits if e.entry.kind == "tool"], key)
    state = await self._try(state, tools, iteration, "tools", {"refused": refused})
    if iteration % self._config.ablate_every == 0:
      state = await self._ablate(state, iteration)
    return state

  async def _try(
    self,
    state: HarnessState,
    edits: Sequence[Edit],
    iteration: int,
    phase: str,
    notes: Mapping[str, Any],
  ) -> HarnessState:
    """The edits, all or none."""
    library = state.library
    for edit in edits:
      library = edit.apply(library)
    if library == state.library:
      note = {"iteration": iteration, "phase": phase, "kept": False, "edits": 0, **notes}
      return dataclasses.replace(state, history=(*state.history, note))
    measured = await self._measure(library)
    # Accuracies are multiples of 1 / n: a difference of rounding must not decide.
    kept = measured >= state.best_accuracy - self._config.tolerance - 1e-9
    note = {"iteration": iteration, "phase": phase, "accuracy": measured, "kept": kept}
    note |= {"edits": len(edits), **notes}
    state = dataclasses.replace(state, history=(*state.history, note))
    return self._keep(state, library, measured) if kept else state

  def _keep(self, state: HarnessState, library: Library, measured: float) -> HarnessState:
    state = dataclasses.replace(state, library=library, accuracy=measured)
    if measured > state.best_accuracy:
      return dataclasses.replace(state, best=library, best_accuracy=measured)
    return state

  async def _checked(self, edits: Sequence[Edit], key: int) -> tuple[list[Edit], list[str]]:
    """Edits of tools whose tool answers in JSON, and the names of the others."""
    passed, refused = [], []
    for edit in edits:
      if edit.action == "delete":
        passed.append(edit)
        continue
      tool = await self._mended(edit.entry, key)
      if tool is None:
        refused.append(edit.entry.name)
      else:
        passed.append(dataclasses.replace(edit, entry=tool))
    return passed, refused

  async def _mended(self, tool: Entry, key: int) -> Entry | None:
    """The tool, repaired if needed; None if it never answers in JSON."""
    order = sorted(self._train, key=lambda d: question_key(key, tool.name, d.id, d.first))
    samples = order[: self._config.probes]
    for attempt in itertools.count():
      answers = await self._gather(
        [
          self._probe(tool, d, question_key(key, "probe", attempt, i))
          for i, d in enumerate(samples)
        ]
      )
      broken = [answer for answer in answers if last_json_object(answer) is None]
      if len(samples) - len(broken) >= self._config.valid_share * len(samples):
        return tool
      if attempt == self._config.repairs:
        return None
      mended = await self._repair(tool, broken, question_key(key, "repair", tool.name, attempt))
      tool = dataclasses.replace(tool, text=mended.text)
    raise AssertionError("unreachable")

  async def _ablate(self, state: HarnessState, iteration: int) -> HarnessState:
    """Removes every entry without which the accuracy is no lower, one after the other."""
    base = await self._measure(state.library)
    for entry in state.library.entries:
      smaller = state.library.without(entry)
      measured = await self._measure(smaller)
      removed = measured >= base - 1e-9
      note = {"iteration": iteration, "phase": "ablation", "accuracy": measured, "kept": removed}
      state = dataclasses.replace(state, history=(*state.history, note | {"entry": entry.name}))
      if removed:
        base = measured
        state = self._keep(state, smaller, measured)
        fewer = len(smaller.entries) < len(state.best.entries)
        if fewer and measured >= state.best_accuracy - 1e-9:
          state = dataclasses.replace(state, best=smaller)
    return state

  async def _measure(self, library: Library) -> float:
    return accuracy(await self._run(library, self._validation))

  async def _run(self, library: Library, on: Sequence[Demonstration]) -> list[Outcome]:
    # The key is that of the demonstration: libraries are compared under the same draws.
    found = await self._gather(
      [self._judge(library, d, question_key(self._key, "judge", i)) for i, d in enumerate(on)]
    )
    return [Outcome(d, one.choice, one.chain) for d, one in zip(on, found, strict=True)]

  async def _gather(self, work: Sequence[Awaitable[Any]]) -> list[Any]:
    limit = asyncio.Semaphore(self._config.concurrency)

    async def one(item: Awaitable[Any]) -> Any:
      async with limit:
        return await item

    return await asyncio.gather(*map(one, work))
