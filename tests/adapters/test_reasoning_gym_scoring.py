"""reasoning-gym's verifiers: no answer runs, none writes its own score, wrong ones are not paid."""

import asyncio
import json

import pytest

from agentjax.adapters.reasoning_gym import boxed as gym
from agentjax.adapters.reasoning_gym.scoring import ReasoningGymScoring, ReasoningGymVerifier
from agentjax.adapters.reasoning_gym.tasks import ReasoningGymConfig, load_reasoning_gym
from agentjax.config import ConfigError
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.sandbox.interface import RunStatus, SandboxError, SandboxResult
from agentjax.trajectory.record import Status, Task, Trajectory

reasoning_gym = pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def score():
  """Scores an answer to a question of a data set: (value, reason)."""
  verifier = ReasoningGymVerifier(ReasoningGymScoring(cpu_seconds=2))
  with asyncio.Runner() as runner:
    yield lambda answer, entry: runner.run(verifier.score(answer, entry)).value
    runner.run(verifier.close())


def entries(name, count=1, **parameters):
  data = reasoning_gym.create_dataset(name, seed=11, size=count, **parameters)
  return [data[i] for i in range(count)]


EVALUATING = (
  "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24",
  "simple_integration", "intermediate_integration", "polynomial_multiplication",
)  # fmt: skip


@pytest.mark.parametrize("name", EVALUATING)
def test_an_answer_is_never_run(name, score, tmp_path):
  written = tmp_path / "written"
  entry = entries(name)[0]
  for answer in (
    f"[open({str(written)!r}, 'w').write('x')]",
    f"open({str(written)!r}, 'w').write('x')",
    f"__import__('os').system('touch {written}')",
    f"[c for c in ().__class__.__base__.__subclasses__()] and open({str(written)!r}, 'w')",
  ):
    assert score(answer, entry) == 0.0
  assert not written.exists()


# The first three forge the report, the last three reach for the right answer that stands beside.
FORGERIES = (
  "[__import__('os').write(1, b'ready\\n1.0\\n'), __import__('os')._exit(0)]",
  "[print('ready'), print('1.0'), exit(0)]",
  "(lambda: __import__('sys').modules['__main__'].__dict__.update(json=None))()",
  "oracle_answer",
  "entry['answer']",
  "valid_solutions[0]",
)


@pytest.mark.parametrize("name", EVALUATING)
def test_an_answer_cannot_write_its_own_score(name, score):
  entry = entries(name)[0]
  assert [score(answer, entry) for answer in FORGERIES] == [0.0] * len(FORGERIES)
  assert score("nonsense", entry) == 0.0
  assert score(entry["answer"], entry) == 1.0


def test_eval_and_parse_expr_are_taken_from_every_module_of_the_library(score):
  """What a later version evaluates is covered too: the names are shadowed in all modules."""
  gym.verifier("countdown")
  import sympy
  from reasoning_gym.algorithmic import spiral_matrix
  from reasoning_gym.games import countdown

  for parse in (sympy.parse_expr, countdown.parse_expr):
    with pytest.raises(ValueError, match="__import__"):
      parse("__import__('os')")
    assert parse("2*x + sin(x)").diff("x") == parse("cos(x) + 2")
  assert spiral_matrix.eval is gym.evaluate


@pytest.mark.parametrize(
  ("text", "value"),
  [("[1, 'a', (2, -3)]", [1, "a", (2, -3)]), ("(0x1f + 2) << 3", 264), ("7 // 2 % 2", 1)],
)
def test_plain_values_are_evaluated(text, value):
  assert gym.evaluate(text) == value


@pytest.mark.parametrize(
  "text",
  ["f()", "a", "a.b", "[x for x in y]", "lambda: 1", "9**9**9", "1 << 10**9", "'a' * 10**9",
   "f'{a}'", "[1] + [2]", "{1: 2}", "x := 1", "a[0]", "2**-(9**99)"],
)  # fmt: skip
def test_nothing_else_is_evaluated(text):
  with pytest.raises((ValueError, SyntaxError)):
    gym.evaluate(text)


def test_sympy_is_handed_what_was_looked_at():
  seen = []
  parse = gym.parse_expression(lambda text, **rest: seen.append(text))
  parse(" 2*x # __import__('os')")
  assert seen == ["2 * x"]
  for text in ("'x'", "x.y", "f(x)", "S('1')", "x[0]", "sin(x, evaluate=1)", "Integral(x)", "a_b"):
    with pytest.raises(ValueError, match="algebraic"):
      parse(text)
  assert len(seen) == 1


# name, what is written for the reference, what was paid for it by the library.
WRONG = (
  ("puzzle24", "6*4*1*1"),
  ("puzzle24", "24"),
  ("countdown", "{target} # {numbers}"),
  ("countdown", "{target}"),
  ("game_of_life_halting", "anything"),
  ("coin_flip", "0"),
  ("complex_arithmetic", "nan"),
  ("number_sorting", "{nans}"),
  ("gsm_symbolic", "{answer} or 99999"),
  ("gsm_symbolic", "-{answer}"),
  ("gsm_symbolic", "±{answer}"),
  ("word_sorting", "{answer}, zebra"),
  ("spell_backward", "{answer}xyz"),
  ("letter_jumble", "{answer} more"),
  ("fraction_simplification", "{answer} or 1/3"),
  ("intermediate_integration", "Integral({integrand}, x)"),
  ("advanced_geometry", "{answer}, or not"),
  ("fraction_simplification", "{answer} is wrong"),
  ("kakurasu", "not {answer}"),
  ("knights_knaves", "it is not so that {answer}"),
  ("quantum_lock", "not {answer}"),
  ("sokoban", "{answer} is wrong"),
)


@pytest.mark.parametrize(("name", "form"), WRONG)
def test_a_wrong_answer_is_not_paid(name, form, score):
  for entry in entries(name, 4):
    values = entry["metadata"] | {
      "answer": entry["answer"],
      "numbers": " ".join(map(str, entry["metadata"].get("numbers", ())))
      if isinstance(entry["metadata"].get("numbers"), list)
      else "",
      "nans": json.dumps([float("nan")] * 10),
    }
    assert score(form.format_map(values), entry) <= 0.5, entry["answer"]


def boxnet_plan(entry, mover):
  """Moves that bring each box and its target together, the one or the other going all the way."""
  found = {item: cell for cell, items in entry["metadata"]["initial_state"].items()
           for item in items}  # fmt: skip
  plan = []
  for box in [item for item in found if item.startswith("box_")]:
    target = box.replace("box_", "target_")
    item, goal = (box, target) if mover == "box" else (target, box)
    (x, y), (goal_x, goal_y) = (tuple(map(float, found[i].split("_"))) for i in (item, goal))
    while (x, y) != (goal_x, goal_y):
      before, step = (x, y), 1 if (goal_x, goal_y) > (x, y) else -1
      x, y = (x + step, y) if x != goal_x else (x, y + step)
      plan.append({f"Agent{[*before]}": f"move({item}, square{[x, y]})"})
    plan.append({f"Agent{[x, y]}": f"move({box}, {target})"})
  return json.dumps(plan)


def test_targets_that_come_to_their_boxes_are_not_paid(score):
  for entry in entries("boxnet", 3):
    assert score(boxnet_plan(entry, "box"), entry) == 1.0
    assert score(boxnet_plan(entry, "target"), entry) == 0.0


@pytest.mark.parametrize(
  ("name", "form"),
  [
    ("puzzle24", "({answer})"),
    ("countdown", "0 + {answer}"),
    ("chain_sum", "{answer}.0"),
    ("coin_flip", "{answer}0"),
    ("number_sorting", " {answer} "),
    ("fraction_simplification", "${answer}$"),
    ("game_of_life_halting", " {answer}"),
    ("kakurasu", "[[{answer}]]"),
    ("knights_knaves", " {answer}\n"),
    ("quantum_lock", "{answer}\n"),
  ],
)
def test_another_form_of_the_right_answer_is_paid(name, form, score):
  entry = entries(name)[0]
  wanted = 0.0 if name == "countdown" else 1.0  # a number that is not in the puzzle
  assert score(form.format(answer=entry["answer"]), entry) == wanted


def test_an_answer_that_takes_too_long_is_the_policys_loss(score):
  assert score("A+999999999", entries("rush_hour")[0]) == 0.0
  assert score("R999999999 " * 50, entries("rubiks_cube")[0]) <= 0.01
  assert score("(" * 5000, entries("puzzle24")[0]) == 0.0
  assert score("1" * 2**17, entries("chain_sum")[0]) == 0.0


@pytest.mark.parametrize(
  ("status", "output", "value"),
  [
    (RunStatus.OK, "ready\n0.25\n", 0.25),
    (RunStatus.OK, "ready\n7\n", 0.0),
    (RunStatus.OK, "ready\nNaN\n", 0.0),
    (RunStatus.OK, "ready\n1.0\n1.0\n", 0.0),
    (RunStatus.OK, "ready\n[1.0]\n", 0.0),
    (RunStatus.OK, "ready\n", 0.0),
    (RunStatus.ERROR, "ready\n1.0\n", 0.0),
    (RunStatus.KILLED, "ready\n", 0.0),
    (RunStatus.TIMEOUT, "ready\n", 0.0),
    (RunStatus.MEMORY_LIMIT, "ready\n", 0.0),
    (RunStatus.ERROR, "", None),  # the library is not there
    (RunStatus.TIMEOUT, "", None),  # it could not be loaded in time: the answer was not looked at
    (RunStatus.INFRA_ERROR, "", None),
    (SandboxError("gone"), "", None),
  ],
)
def test_only_a_fault_of_the_sandbox_masks(status, output, value):
  class Box:
    async def exec(self, program, **_):
      if isinstance(status, Exception):
        raise status
      return SandboxResult(status, output, "", 0, 0.0)

    async def close(self):
      pass

  class Back:
    async def create(self, snapshot=None):
      return Box()

    async def close(self):
      pass

  async def work():
    verifier = ReasoningGymVerifier(ReasoningGymScoring(), Back())
    try:
      return await verifier.score("1", entries("chain_sum")[0])
    finally:
      await verifier.close()

  reward = asyncio.run(work())
  assert reward.value == value
  assert reward.valid == (value is not None)


def test_the_two_parts_of_a_run():
  entry = entries("basic_arithmetic")[0]
  task = Task(3, (), entry["answer"], "reasoning_gym/basic_arithmetic", metadata={"entry": entry})
  config = RewardConfig(parts=("reasoning_gym", "reasoning_gym_graded"), weights=(1.0, 0.0))

  def episode(answer, status=Status.OK):
    return Trajectory(
      step=0, task_id=3, sample=0, source="", segments=[], answer=answer, status=status
    )

  async def work():
    graph = build_rewards(config)
    episodes = [
      episode(entry["answer"]),
      episode(f"{entry['answer']} 17"),  # a list of answers earns a share by the library
      episode("no"),
      episode(None),
      episode(entry["answer"], Status.POLICY_ERROR),
    ]
    for one in episodes:
      await graph.score(one, task)
    await graph.close()
    return [
      (e.reward_parts["reasoning_gym"].value, e.reward_parts["reasoning_gym_graded"].value)
      for e in episodes
    ]

  right, listed, *others = asyncio.run(work())
  assert right == (1.0, 1.0)
  assert listed[0] == 0.0 and 0.1 < listed[1] <= 0.5
  assert others == [(0.0, 0.0)] * 3


def test_a_set_whose_verifier_cannot_be_mended_is_refused_by_name():
  config = ReasoningGymConfig(name="propositional_logic")
  with pytest.raises(ConfigError, match="config.data.source.name='propositional_logic'"):
    load_reasoning_gym(config, train_size=1, test_size=0, seed=0)


def test_a_question_repeated_as_its_own_integral_is_no_worked_solution():
  config = ReasoningGymConfig(name="intermediate_integration")
  tasks = load_reasoning_gym(config, train_size=100, test_size=0, seed=5).train
  entries_ = [task.metadata["entry"]["answer"] for task in tasks]
  assert any("Integral(" in answer for answer in entries_)
  assert not any("Integral(" in task.answer or task.demonstration != () for task in tasks
                 if "Integral(" in task.metadata["entry"]["answer"])  # fmt: skip


# Sets whose reference is None: many answers are right and none is stated.
UNSTATED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


NEGATIONS = ("not {}", "{} is wrong", "not\n{}", "{}\nis wrong", "{}, or not")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*reasoning_gym.factory.DATASETS} - {"composite"}))
def test_every_set_pays_its_reference_and_no_cheap_answer(name, score):
  several = entries(name, 4)
  for number, entry in enumerate(several):
    answer = entry["answer"]
    if answer is None:
      assert name in UNSTATED
      answer = "zzz"
    elif "Integral(" not in answer:
      assert score(answer, entry) == 1.0
    other = str(several[number - 1]["answer"])
    cheap = {
      " ", entry["question"], "0", "1", "nan", "inf", "None", "[]", "{}", "zzz",
      f"{other} or {answer}", f"{answer} or {other}" if name != "sokoban" else "",
      " ".join(map(str, range(1000))),
      *(around.format(answer) for around in NEGATIONS if entry["answer"] is not None),
    } - {answer}  # fmt: skip
    paid = {text for text in cheap if answer not in ("0", "1") and score(text, entry) > 0.5}
    assert not paid, answer
