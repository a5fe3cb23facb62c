"""``python -m agentjax COMMAND``: the same as ``python -m agentjax.COMMAND``, and ``fields``.

``recipes.METHOD.COMMAND`` is a command of a published method.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

COMMANDS = {
  "train": "trains an experiment, resumes it, replays a step",
  "stages": "trains runs that build on each other",
  "evaluate": "measures a checkpoint on held-out tasks",
  "agent": "talks with an agent in the terminal",
  "fields": "lists the fields of a config: agentjax fields rl.optimizer",
  "check": "tries to cheat a config's rewards",
  "rescore": "computes the rewards of stored episodes again",
  "plan": "compiles a run for TPUs that are not there",
  "train_tokenizer": "makes a vocabulary from text",
  "convert": "Hugging Face folder to checkpoint and back",
}


RECIPE = "recipes.METHOD.COMMAND"


def _is_recipe(word: str) -> bool:
  """Whether a word is the name of a module of a recipe."""
  folder, _, rest = word.partition(".")
  if folder != "recipes" or not all(part.isidentifier() for part in rest.split(".")):
    return False
  try:
    return importlib.util.find_spec(f"agentjax.{word}") is not None
  except ModuleNotFoundError:
    return False


def main() -> None:
  """Runs the command that the first word names."""
  words = sys.argv[1:]
  if not words or words[0] in ("-h", "--help"):
    width = max(map(len, COMMANDS))
    print("agentjax COMMAND [--flag=value ...]; each command has --help.\n")
    print("\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()))
    print(f"  {RECIPE}  of a published method; python -m agentjax.recipes lists them")
    sys.exit(0 if words else 2)
  if words[0] not in COMMANDS and not _is_recipe(words[0]):
    allowed = ", ".join((*COMMANDS, RECIPE))
    print(f"error: no command {words[0]!r}; allowed: {allowed}.", file=sys.stderr)
    sys.exit(2)
  if words[0] == "fields":
    from agentjax.fields import main as fields

    sys.exit(fields(words[1:]))
  sys.argv = [f"agentjax {words[0]}", *words[1:]]
  runpy.run_module(f"agentjax.{words[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
