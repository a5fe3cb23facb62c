"""Nothing that a policy writes is run in the trainer, and reading it takes linear time."""

import ast
import pathlib
import signal

import pytest

import agentjax
from agentjax.adapters.huggingface_text.calls import parse_text
from agentjax.recipes.c2.rubrics import read_rubric, read_verdict
from agentjax.recipes.genrm.cohort import style_density
from agentjax.recipes.rational_rewards.critiques import read_critique
from agentjax.rewards.answers import answers_equal
from agentjax.rewards.judges import last_json_object
from agentjax.rewards.monitor import MONITORS
from agentjax.text.answers import read_marked_answer, read_tagged_answer
from agentjax.text.tool_calls import load_json
from agentjax.trajectory.record import Trajectory
from agentjax.world.text_game import read_actions
from agentjax.worlds.code.code_block import read_code
from agentjax.worlds.countdown.game import read_expression
from agentjax.worlds.sql.environment import read_query

ROOT = pathlib.Path(agentjax.__file__).parent

# What makes code or objects of a text, and where that is allowed: what is read there, or where it
# runs. ast.parse runs nothing, but takes memory and time.
RUNS = {
  "eval", "exec", "compile", "__import__", "parse_expr", "sympify", "literal_eval", "Unpickler",
  "pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "dill.loads", "cloudpickle.loads",
  "shelve.open", "yaml.load", "yaml.unsafe_load", "torch.load", "joblib.load", "ast.parse",
}  # fmt: skip
ALLOWED = {
  ("sandbox/programs.py", "ast.parse"): "in a box",
  ("sandbox/programs.py", "eval"): "in a box",
  ("sandbox/programs.py", "exec"): "in a box",
  ("sandbox/programs.py", "compile"): "in a box",
  ("adapters/reasoning_gym/boxed.py", "pickle.loads"): "in a box, what the trainer wrote",
  ("adapters/reasoning_gym/boxed.py", "ast.parse"): "in a box",
  ("adapters/unit_tests/boxed/tests.py", "exec"): "in a box",
  ("adapters/unit_tests/boxed/tests.py", "compile"): "in a box",
  ("adapters/unit_tests/boxed/tests.py", "ast.parse"): "in a box",
  ("recipes/grandcode/inputs.py", "ast.parse"): "texts of the tasks",
  ("recipes/grandcode/inputs.py", "literal_eval"): "texts of the tasks",
  ("recipes/grandcode/one_problem.py", "ast.parse"): "the user's own problem",
  ("rewards/formula.py", "ast.parse"): "a text of the config",
  ("worlds/countdown/game.py", "ast.parse"): "at most 200 characters",
  ("worlds/code/tasks.py", "ast.parse"): "files of the data set",
  ("worlds/code/function_tasks.py", "exec"): "texts of that file",
  ("worlds/repair/mutations.py", "ast.parse"): "files of the project",
  ("worlds/repair/tasks.py", "ast.parse"): "files of the project",
  ("worlds/retail/desk.py", "ast.parse"): "at most 200 characters",
}


def _runners():
  """(file, name) of every call of one of RUNS, under its own name or that of its module."""
  for path in sorted(ROOT.rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Call):
        for name in {ast.unparse(node.func), getattr(node.func, "attr", "")} & RUNS:
          # Others have methods of these names: re.compile, jitted.compile, box.exec.
          if isinstance(node.func, ast.Name) or name not in ("compile", "exec", "eval"):
            yield path.relative_to(ROOT).as_posix(), name


def test_nothing_in_the_trainer_runs_a_text():
  found = set(_runners())
  assert found - set(ALLOWED) == set()
  assert set(ALLOWED) - found == set()  # what is allowed is there


SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
READERS = {
  "read_marked_answer": read_marked_answer,
  "read_tagged_answer": read_tagged_answer,
  "answers_equal": lambda text: answers_equal(text, "1"),
  "read_code": read_code,
  "read_query": read_query,
  "read_expression": lambda text: read_expression(text, tags=True),
  "read_actions": lambda text: read_actions(text, ("Up", "Down"), tags=True),
  "load_json": load_json,
  "hermes": lambda text: parse_text(f"<tool_call>{text}", SCHEMAS, "hermes"),
  "xml": lambda text: parse_text(
    f"<tool_call><function=f>{text}</function></tool_call>", SCHEMAS, "xml"
  ),
  "read_critique": read_critique,
  "read_rubric": lambda text: read_rubric(f"<analyze></analyze>{text}"),
  "read_verdict": lambda text: read_verdict(text, with_rubric=True),
  "style_density": style_density,
  "last_json_object": last_json_object,
  "monitors": lambda text: [
    monitor(Trajectory(0, 0, 0, "", [], answer=text), None) for monitor in MONITORS.values()
  ],
}
REPEATED = (
  "\n", " ", "`", "```python\n", "```sql\n", "<answer>", "<tool_call>", "<parameter=a>", "{", "[",
  '{"a":[', "(", "1,", "9", "/*", "'", "**", "<analyze>", "def __eq__(", "#### ", "$",
)  # fmt: skip
BEGUN = ("", "answer:", "text_faithfulness", "<answer>", "<parameter=a>\n")
SIZE = 100_000  # characters: at quadratic time some 10 s
SECONDS = 4.0


class _TooSlow(Exception):
  pass


@pytest.mark.parametrize("name", READERS)
def test_what_a_policy_writes_is_read_in_linear_time(name):
  read = READERS[name]

  def stop(*_):
    raise _TooSlow

  before = signal.signal(signal.SIGALRM, stop)
  try:
    for piece in REPEATED:
      for begin in BEGUN if len(piece) == 1 else BEGUN[:1]:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
          read(begin + piece * (SIZE // len(piece)))
        except _TooSlow:
          pytest.fail(f"{name} of {begin!r} and {piece!r} repeated takes over {SECONDS} s")
        finally:
          signal.setitimer(signal.ITIMER_REAL, 0)
  finally:
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("<answer>a</answer>", "a"),
    ("<answer>a</answer> <answer>b</answer>", "b"),
    ("<answer>a</answer> <answer>b", "a"),
    ("<answer>a</answer> more </answer>", "a"),
    ("<answer><answer>a</answer>", "a"),
    ("</answer><answer>", None),
    ("<answer>", None),
    ("", None),
  ],
)
def test_the_last_closed_tag_holds_the_answer(text, answer):
  assert read_tagged_answer(text) == answer
