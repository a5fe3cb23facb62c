"""Generated word problems: seeded, graded, with a worked solution through tools.

A problem is a start and a chain of steps; its level is the number of tool calls its solution takes.
A story starts from a number that somebody owns; a program problem starts from a sum over many
numbers, which takes one line of Python::

    Mia has 24 books. Leo gives Mia 17. Soon Mia has 3 times as many. ...  calculator, calculator
    Take the sum of all multiples of 6 below 60. Then subtract 15. ...     python, calculator

Numbers mostly have two digits, so that a small policy cannot do the sums itself and must learn to
read, to call and to copy. The vocabulary is closed (``vocabulary()``), so that a few hundred pieces
spell it in whole words.

Train and test never share a problem: the arithmetic alone (``Problem.content``, without names and
wording) decides by its hash on which side a problem falls, for any seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from agentjax.config import Share, check
from agentjax.data.config import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.text.answers import mark_answer
from agentjax.trajectory.record import Message, Task, ToolCall

SOURCE = "word_problems"
MAX_LEVEL = 4
_TEST_SHARE = 0.2  # of all contents; a constant, since it decides which side a problem is on
_LARGEST = {"story": 999, "program": 9999}  # any value on the way
_SMALLEST = 11  # likewise, so that the chain never runs dry
_COMPARISON_SHARE = 0.3  # of the last steps of stories

_NAMES = ("Ann", "Ben", "Eva", "Leo", "Max", "Mia", "Sam", "Zoe")
_OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
_OPENINGS = (
  "{name} has {start} {objects}.",
  "{name} starts with {start} {objects}.",
  "{name} collects {start} {objects}.",
)
_STORY_STEPS: Mapping[str, tuple[str, ...]] = {
  "+": (
    "{name} buys {x} more.",
    "{name} finds {x} more.",
    "{friend} gives {name} {x}.",
    "Then {name} gets {x} from {friend}.",
  ),
  "-": (
    "{name} loses {x}.",
    "{name} sells {x}.",
    "{name} gives {friend} {x}.",
    "Then {friend} gets {x} from {name}.",
  ),
  "*": (
    "Soon {name} has {x} times as many.",
    "The number is multiplied by {x}.",
    "{name} fills {x} such bags.",
  ),
  "/": (
    "{name} keeps one of {x} equal parts.",
    "The number is divided by {x}.",
    "One of {x} equal parts is left.",
  ),
}
_STORY_QUESTIONS = (
  "How many {objects} does {name} have now?",
  "What is the number of {objects} now?",
)
# Comparisons end a story: the sentence and its own question.
_COMPARISONS: Mapping[str, tuple[tuple[str, str], ...]] = {
  "+": (
    ("{friend} has {x} more than {name}.", "How many {objects} does {friend} have?"),
    ("{name} has {x} fewer than {friend}.", "How many {objects} does {friend} have?"),
  ),
  "-": (
    ("{friend} has {x} fewer than {name}.", "How many {objects} does {friend} have?"),
    ("{friend} has {x}.", "How many more {objects} does {name} have than {friend}?"),
  ),
  "*": (("{friend} has {x} times as many as {name}.", "How many {objects} does {friend} have?"),),
  "/": (("{name} has {x} times as many as {friend}.", "How many {objects} does {friend} have?"),),
}
_DISTRACTORS = (
  "{name} is {noise} years old.",
  "{other} owns {noise} {others}.",
  "It rains for {noise} days.",
  "The shop is {noise} steps away.",
)
_PROGRAM_OPENINGS: Mapping[str, tuple[str, ...]] = {
  "multiples": (
    "Take the sum of all multiples of {a} below {b}.",
    "Add up the multiples of {a} that are below {b}.",
  ),
  "consecutive": (
    "Take the sum of all numbers from {a} to {b}.",
    "Add up the numbers from {a} to {b}.",
  ),
  "squares": (
    "Take the sum of all squares from {a} times {a} to {b} times {b}.",
    "Add up the squares of the numbers from {a} to {b}.",
  ),
  "saving": (
    "{name} saves {a} coins on day one, each next day {b} more than before, for {c} days.",
  ),
}
_PROGRAM_CODE: Mapping[str, str] = {
  "multiples": "print(sum(range({a},{b},{a})))",
  "consecutive": "print(sum(range({a},{b}+1)))",
  "squares": "print(sum(i*i for i in range({a},{b}+1)))",
  "saving": "print(sum(range({a},{a}+{b}*{c},{b})))",
}
_PROGRAM_STEPS: Mapping[str, tuple[str, ...]] = {
  "+": ("Then add {x}.", "Increase the result by {x}."),
  "-": ("Then subtract {x}.", "Lower the result by {x}."),
  "*": ("Then multiply by {x}.", "Take the result {x} times."),
  "/": ("Then divide by {x}.", "Take one of {x} equal parts."),
}
_PROGRAM_QUESTION = "What is the result?"
_WRONG_OPERATOR = {"+": "-", "-": "+", "*": "+", "/": "-"}  # keeps every value an integer


@dataclasses.dataclass(unsafe_hash=True)
class WordProblemConfig(TaskSource):
  """Which problems there are, and which of them come with a demonstration. All figures are ours.

  Levels outside ``demonstration_levels`` and a share of wrong demonstrations make the warm start
  imperfect in a known way, so that the effect of reinforcement learning can be seen.

  Attributes:
    levels: tool calls a problem takes, each 1..4; task i has level ``levels[i % len(levels)]``.
    program_share: share of problems that start from a line of Python.
    distractors_from_level: problems of this level and above contain one irrelevant number.
    demonstration_levels: levels whose train tasks carry a demonstration; None means all.
    demonstration_noise: share of demonstrations that are wrong: half of them use a wrong operation
      in one step, half stop one step early. Their tool results are still true. Programs of level 1
      have no such step and stay right. Test tasks are never wrong.
    direct_share: share of demonstrations that state the right answer at once, without a tool: a
      policy that cannot do sums learns from them to guess; rewards then teach it to use tools.
  """

  levels: tuple[int, ...] = (1, 2, 3)
  program_share: Share = 0.15
  distractors_from_level: int = 3
  demonstration_levels: tuple[int, ...] | None = None
  demonstration_noise: Share = 0.0
  direct_share: Share = 0.0

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    require = self.requirements(path)
    for name in ("levels", "demonstration_levels"):
      levels = getattr(self, name)
      if levels is not None:
        check(
          all(1 <= level <= MAX_LEVEL for level in levels),
          f"{path}.{name}",
          levels,
          f"levels 1..{MAX_LEVEL}",
        )
    require(len(self.levels) > 0, "levels", "at least one level")
    require(
      self.distractors_from_level >= 1,
      "distractors_from_level",
      f">= 1; above {MAX_LEVEL} switches distractors off",
    )

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    return word_problems(self, train_size=data.train_size, test_size=data.test_size, seed=data.seed)


@dataclasses.dataclass(frozen=True)
class Step:
  """``value operator operand``, on integers; "/" always divides exactly."""

  operator: str  # "+" | "-" | "*" | "/"
  operand: int

  def apply(self, value: int) -> int:
    match self.operator:
      case "+":
        return value + self.operand
      case "-":
        return value - self.operand
      case "*":
        return value * self.operand
      case "/" if value % self.operand == 0:
        return value // self.operand
    raise ValueError(f"{value}{self.operator}{self.operand} is not an integer step")


@dataclasses.dataclass(frozen=True)
class Program:
  """A sum over many numbers: ``form`` with its two or three figures."""

  form: str  # a key of _PROGRAM_CODE
  a: int
  b: int
  c: int = 0

  @property
  def code(self) -> str:
    return _PROGRAM_CODE[self.form].format(a=self.a, b=self.b, c=self.c)

  @property
  def value(self) -> int:
    match self.form:
      case "multiples":
        return sum(range(self.a, self.b, self.a))
      case "consecutive":
        return sum(range(self.a, self.b + 1))
      case "squares":
        return sum(i * i for i in range(self.a, self.b + 1))
      case "saving":
        return sum(self.a + self.b * day for day in range(self.c))
    raise ValueError(f"unknown form {self.form!r}")


@dataclasses.dataclass(frozen=True)
class Problem:
  """The arithmetic of a problem, without its words."""

  start: int | Program
  steps: tuple[Step, ...]

  @property
  def family(self) -> Literal["story", "program"]:
    return "program" if isinstance(self.start, Program) else "story"

  @property
  def level(self) -> int:
    return len(self.steps) + isinstance(self.start, Program)

  @property
  def values(self) -> tuple[int, ...]:
    """The start's value and the value after each step; the last is the answer."""
    values = [self.start.value if isinstance(self.start, Program) else self.start]
    for step in self.steps:
      values.append(step.apply(values[-1]))
    return tuple(values)

  @property
  def content(self) -> str:
    """What makes two problems the same: the chain, with the operands of a leading sum in order."""
    start, steps = self.start, list(self.steps)
    if isinstance(start, int) and steps and steps[0].operator == "+":
      low, high = sorted((start, steps[0].operand))
      start, steps[0] = low, Step("+", high)
    head = start.code if isinstance(start, Program) else str(start)
    return head + "".join(f"{s.operator}{s.operand}" for s in steps)

  @property
  def split(self) -> Literal["train", "test"]:
    digest = hashlib.sha256(self.content.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < _TEST_SHARE * 2**64 else "train"


def word_problems(
  config: WordProblemConfig, *, train_size: int, test_size: int, seed: int
) -> TaskSplits:
  """Train and test tasks. Task i depends on the config, the seed and i, not on the sizes.

  Test problems differ from each other in content; train problems may repeat one in other words.
  ``metadata`` holds level, family, operators, and what the demonstration is: "right",
  "wrong_operation", "stops_early", "direct" or "none".

  Raises:
    DataError: there are not ``test_size`` different test problems.
  """
  config.validate()
  return TaskSplits(
    train=[_train_task(config, seed, index) for index in range(train_size)],
    test=_test_tasks(config, seed, test_size),
  )


def vocabulary() -> frozenset[str]:
  """Every word of every prompt, without numbers and punctuation."""
  return (
    frozenset(
      word for template in _templates() for word in re.findall(r"[A-Za-z]+", _bare(template))
    )
    | frozenset(_NAMES)
    | frozenset(_OBJECTS)
  )


def _train_task(config: WordProblemConfig, seed: int, index: int) -> Task:
  random_source = _random(seed, "train", index)
  problem = _draw_problem(config, random_source, index, "train")
  prompt = _tell(config, problem, random_source)
  noisy = random_source.random() < config.demonstration_noise
  kind = random_source.choice(("wrong_operation", "stops_early")) if noisy else "right"
  if noisy and not problem.steps:
    kind = "right"
  if random_source.random() < config.direct_share:
    kind = "direct"
  levels = config.demonstration_levels
  if levels is not None and problem.level not in levels:
    kind = "none"
  return _task(index, problem, prompt, _demonstrate(problem, kind, random_source), kind)


def _test_tasks(config: WordProblemConfig, seed: int, size: int) -> list[Task]:
  tasks: list[Task] = []
  seen: set[str] = set()
  for index in range(size):
    random_source = _random(seed, "test", index)
    for _ in range(1000):
      problem = _draw_problem(config, random_source, index, "test")
      if problem.content not in seen:
        break
    else:
      raise DataError(
        f"no {size} different test problems at levels {config.levels}; lower "
        "config.data.test_size or allow higher levels",
        SOURCE,
      )
    seen.add(problem.content)
    prompt = _tell(config, problem, random_source)
    demonstration = _demonstrate(problem, "right", random_source)
    tasks.append(_task(FIRST_TEST_ID + index, problem, prompt, demonstration, "right"))
  return tasks


def _task(
  task_id: int, problem: Problem, prompt: str, demonstration: tuple[Message, ...], kind: str
) -> Task:
  return Task(
    id=task_id,
    prompt=(Message("user", prompt),),
    answer=str(problem.values[-1]),
    source=SOURCE,
    demonstration=demonstration,
    metadata={
      "level": problem.level,
      "family": problem.family,
      "operators": "".join(s.operator for s in problem.steps),
      "demonstration": kind,
    },
  )


def _random(seed: int, split: str, index: int) -> random.Random:
  return random.Random(f"{SOURCE}/{seed}/{split}/{index}")


def _draw_problem(
  config: WordProblemConfig, random_source: random.Random, index: int, split: str
) -> Problem:
  level = config.levels[index % len(config.levels)]
  is_program = random_source.random() < config.program_share
  while True:
    problem = (_draw_program if is_program else _draw_story)(random_source, level)
    if problem is not None and problem.split == split:
      return problem


def _draw_story(random_source: random.Random, level: int) -> Problem | None:
  operators = [random_source.choice("+-*/") for _ in range(level)]
  start = random_source.randint(11, 99)
  if operators[0] == "/":  # otherwise few numbers of two digits divide well
    start *= random_source.randint(2, 9)
  return _draw_steps(random_source, start, start, operators, _LARGEST["story"])


def _draw_program(random_source: random.Random, level: int) -> Problem | None:
  draw = random_source.randint
  match form := random_source.choice(tuple(_PROGRAM_CODE)):
    case "multiples":
      program = Program(form, draw(3, 9), draw(30, 99))
    case "consecutive":
      low = draw(2, 49)
      program = Program(form, low, draw(low + 10, 99))
    case "squares":
      low = draw(1, 9)
      program = Program(form, low, draw(low + 3, 25))
    case _:
      program = Program(form, draw(2, 20), draw(2, 9), draw(5, 30))
  operators = [random_source.choice("+-*/") for _ in range(level - 1)]
  return _draw_steps(random_source, program, program.value, operators, _LARGEST["program"])


def _draw_steps(
  random_source: random.Random,
  start: int | Program,
  value: int,
  operators: list[str],
  largest: int,
) -> Problem | None:
  """The chain, or None where a step finds no operand that keeps the value within bounds."""
  steps: list[Step] = []
  if not _SMALLEST <= value <= largest:
    return None
  for operator in operators:
    operands = _operands(operator, value, largest)
    if not operands:
      return None
    steps.append(Step(operator, random_source.choice(operands)))
    value = steps[-1].apply(value)
  return Problem(start, tuple(steps))


def _operands(operator: str, value: int, largest: int) -> Sequence[int]:
  """Operands that keep the value an integer in _SMALLEST..largest."""
  match operator:
    case "+":
      return range(11, min(99, largest - value) + 1)
    case "-":
      return range(11, min(99, value - _SMALLEST) + 1)
    case "*":
      return range(2, min(9, largest // value) + 1)
  return [x for x in range(2, 10) if value % x == 0 and value // x >= _SMALLEST]


def _tell(config: WordProblemConfig, problem: Problem, random_source: random.Random) -> str:
  """The problem in words."""
  name, friend, other = random_source.sample(_NAMES, 3)
  objects, others = random_source.sample(_OBJECTS, 2)
  words = {"name": name, "friend": friend, "other": other, "objects": objects, "others": others}
  pick = random_source.choice
  if isinstance(problem.start, Program):
    program = problem.start
    figures = {"a": program.a, "b": program.b, "c": program.c}
    sentences = [pick(_PROGRAM_OPENINGS[program.form]).format(**words, **figures)]
    sentences += [pick(_PROGRAM_STEPS[s.operator]).format(x=s.operand) for s in problem.steps]
    question = _PROGRAM_QUESTION
  else:
    sentences = [pick(_OPENINGS).format(**words, start=problem.start)]
    sentences += [
      pick(_STORY_STEPS[s.operator]).format(**words, x=s.operand) for s in problem.steps
    ]
    question = pick(_STORY_QUESTIONS)
    if random_source.random() < _COMPARISON_SHARE:
      last = problem.steps[-1]
      sentence, question = pick(_COMPARISONS[last.operator])
      sentences[-1] = sentence.format(**words, x=last.operand)
  if problem.level >= config.distractors_from_level:
    distractor = pick(_DISTRACTORS).format(**words, noise=random_source.randint(11, 99))
    sentences.insert(random_source.randint(1, len(sentences)), distractor)
  return " ".join([*sentences, question.format(**words)])


def _demonstrate(problem: Problem, kind: str, random_source: random.Random) -> tuple[Message, ...]:
  """Calls, results and the answer; ``kind`` as in the metadata."""
  steps = list(problem.steps)
  match kind:
    case "none":
      return ()
    case "direct":
      return (Message("assistant", mark_answer(str(problem.values[-1]))),)
    case "stops_early":
      steps.pop()
    case "wrong_operation":
      at = random_source.randrange(len(steps))
      steps[at] = Step(_WRONG_OPERATOR[steps[at].operator], steps[at].operand)
  messages: list[Message] = []
  if isinstance(problem.start, Program):
    value = problem.start.value
    messages += _exchange("python", "code", problem.start.code, value)
  else:
    value = problem.start
  for step in steps:
    expression = f"{value}{step.operator}{step.operand}"
    # After a wrong step an exact division may not be one any more: then the demonstration stops.
    if step.operator == "/" and value % step.operand:
      break
    value = step.apply(value)
    messages += _exchange("calculator", "expression", expression, value)
  return (*messages, Message("assistant", mark_answer(str(value))))


def _exchange(tool: str, argument: str, text: str, result: int) -> Iterator[Message]:
  yield Message("assistant", "", (ToolCall(tool, {argument: text}),))
  yield Message("tool", str(result))


def _templates() -> Iterator[str]:
  for single in (_OPENINGS, _STORY_QUESTIONS, _DISTRACTORS, (_PROGRAM_QUESTION,)):
    yield from single
  for table in (_STORY_STEPS, _PROGRAM_OPENINGS, _PROGRAM_STEPS):
    for phrasings in table.values():
      yield from phrasings
  for pairs in _COMPARISONS.values():
    for pair in pairs:
      yield from pair


def _bare(template: str) -> str:
  """The template without its fields."""
  return " ".join(text for text, *_ in string.Formatter().parse(template))
