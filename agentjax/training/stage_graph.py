"""Runs that build on each other: a graph of stages, each with a folder of its own.

A file of stages defines ``get_stages()``::

  def warm(done):
    return load_experiment("configs/quickstart.py")

  def reinforced(done):
    return begun_from(load_experiment("configs/prime_word_problems.py"), done["warm"])

  def get_stages():
    return (Stage("warm", warm), Stage("reinforced", reinforced, after=("warm",)))

A stage is given the folders of those that it names, so each of them may be what it begins from, its
teacher, its data, or all of these. Two stages that begin from the same one restart from it.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from agentjax.config import ConfigError
from agentjax.files import write_atomically, written_beside
from agentjax.names import load_config_module
from agentjax.text import SentencePieceTokenizer, TokenizerConfig
from agentjax.training import processes
from agentjax.training.experiment import Experiment, load_experiment, resolve, write_experiment
from agentjax.training.flags import set_field
from agentjax.training.run import Run
from agentjax.training.workdir import CONFIG_FILE

Folders = Mapping[str, pathlib.Path]
_STATE, _VOCABULARY = "stages.json", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Stage:
  """One node of the graph. It has an experiment or work, not both.

  Attributes:
    name: of the stage and of its folder.
    experiment: what is trained, from the folders of ``after`` by name.
    work: anything else, such as writing data or joining networks: called with the folders of
      ``after`` and a new one, which takes the stage's place once the call has returned. It is
      called again if it was stopped; of several processes the first calls it.
    after: stages that have to be finished before.
  """

  name: str
  experiment: Callable[[Folders], Experiment] | None = None
  work: Callable[[Folders, pathlib.Path], None] | None = None
  after: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    if not self.name.isidentifier():
      raise ConfigError(f"Stage.name={self.name!r}; allowed: a Python identifier.")
    if (self.experiment is None) == (self.work is None):
      raise ConfigError(f"the stage {self.name!r} must have either an experiment or work.")


def load_stages(path: str | os.PathLike[str]) -> tuple[Stage, ...]:
  """The stages of a ``.py`` file with ``get_stages()``, in an order in which they can be done.

  Raises:
    ConfigError: no such file, no ``get_stages``, or as ``order_stages``.
  """
  file, flag = pathlib.Path(path), f"--stages={os.fspath(path)!r}"
  if file.suffix != ".py" or not file.is_file():
    raise ConfigError(f"{flag}; allowed: a .py file with get_stages().")
  try:
    module = load_config_module(file)
    if not hasattr(module, "get_stages"):
      raise ConfigError(f"{flag} defines no get_stages().")
    stages = tuple(module.get_stages())
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:  # the file is a program: it may fail in any way
    raise ConfigError(f"{flag} fails: {type(error).__name__}: {error}") from error
  if other := [stage for stage in stages if not isinstance(stage, Stage)]:
    raise ConfigError(f"{flag}: get_stages() has {other[0]!r}; allowed: Stage.")
  return order_stages(stages)


def order_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
  """The stages, each behind those that it names; otherwise as given.

  Raises:
    ConfigError: two of one name, a name that no stage has, or a circle.
  """
  known = {stage.name: stage for stage in stages}
  if len(known) < len(stages):
    raise ConfigError(f"stages are called {[s.name for s in stages]}; allowed: different names.")
  for stage in stages:
    if unknown := [name for name in stage.after if name not in known]:
      raise ConfigError(
        f"the stage {stage.name!r} comes after {unknown}; allowed: {', '.join(known)}."
      )
  ordered: list[Stage] = []
  left = list(stages)
  while left:
    done = {stage.name for stage in ordered}
    ready = next((stage for stage in left if done.issuperset(stage.after)), None)
    if ready is None:
      raise ConfigError(f"stages wait for each other: {', '.join(stage.name for stage in left)}.")
    ordered.append(ready)
    left.remove(ready)
  return tuple(ordered)


def needed_for(stages: Sequence[Stage], names: Sequence[str]) -> tuple[Stage, ...]:
  """Those of the ordered stages that the named ones need, and these.

  Raises:
    ConfigError: a name that no stage has.
  """
  if unknown := sorted(set(names) - {stage.name for stage in stages}):
    raise ConfigError(
      f"--until has {unknown}; allowed: {', '.join(stage.name for stage in stages)}."
    )
  wanted = set(names)
  for stage in reversed(stages):
    if stage.name in wanted:
      wanted.update(stage.after)
  return tuple(stage for stage in stages if stage.name in wanted)


def begun_from(experiment: Experiment, run: str | os.PathLike[str]) -> Experiment:
  """The experiment, beginning with the networks of a run: its model, vocabulary and chat are taken
  over, and its newest checkpoint is ``start_from``."""
  folder = pathlib.Path(run)
  earlier = load_experiment(folder / CONFIG_FILE)
  experiment.model, experiment.chat = copy.deepcopy(earlier.model), copy.deepcopy(earlier.chat)
  experiment.tokenizer, experiment.pretrained = copy.deepcopy(earlier.tokenizer), earlier.pretrained
  vocabulary = folder / _VOCABULARY
  if vocabulary.exists():  # made of the tasks of that run
    experiment.tokenizer = TokenizerConfig(kind="sentencepiece", path=str(vocabulary))
    experiment.model.vocab_size = SentencePieceTokenizer(vocabulary).vocab_size
  experiment.start_from = str(folder)
  return experiment


class StageGraph:
  """Does the stages of a graph, from wherever an earlier process got to.

  ``stages.json`` says which are finished, with which settings, and on which they were built.

  Args:
    stages: in order, as ``order_stages`` gives them.
    workdir: holds a folder for each.
    settings: by stage, fields of its experiment and their values as text: ("rl.steps", "5").
    console: where progress is shown.
  """

  def __init__(
    self,
    stages: Sequence[Stage],
    workdir: str | os.PathLike[str],
    settings: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    console: Console | None = None,
  ):
    self._stages, self._workdir = tuple(stages), pathlib.Path(workdir).absolute()
    self._settings, self._console = settings or {}, console or Console()
    for name in self._settings:
      if name not in {stage.name for stage in self._stages if stage.experiment is not None}:
        raise ConfigError(f"--set={name}. ...: no stage of this name has an experiment.")

  def run(self) -> bool:
    """Whether all are finished; False where one was interrupted: the same call goes on.

    Raises:
      ConfigError: as ``Run``; a stage was built on others than those that are there now.
    """
    state = self._read()
    marks: dict[str, str] = {}
    for stage in self._stages:
      after = {name: marks[name] for name in stage.after}
      experiment = self._experiment(stage)
      own = "" if experiment is None else self._text_of(experiment)
      mark = hashlib.sha256(json.dumps([own, after], sort_keys=True).encode()).hexdigest()
      known, folder = state.get(stage.name), self._workdir / stage.name
      if known is not None and known["after"] != after and folder.exists():
        raise ConfigError(
          f"{folder} was built on earlier settings of {', '.join(stage.after)}; remove it to build "
          "it anew, or give another --workdir."
        )
      marks[stage.name] = mark
      if known == {"mark": mark, "after": after, "finished": True} and folder.exists():
        self._console.print(f"{stage.name}: finished before", highlight=False)
        continue
      self._write(state, stage.name, {"mark": mark, "after": after, "finished": False})
      self._console.print(f"{stage.name}: {folder}", highlight=False)
      if experiment is None:
        self._work(stage, folder)
      elif not Run(experiment, folder, console=self._console).train().finished:
        return False
      self._write(state, stage.name, {"mark": mark, "after": after, "finished": True})
    return True

  def _folders(self, stage: Stage) -> Folders:
    return {name: self._workdir / name for name in stage.after}

  def _experiment(self, stage: Stage) -> Experiment | None:
    if stage.experiment is None:
      return None
    experiment = stage.experiment(self._folders(stage))
    for path, text in self._settings.get(stage.name, ()):
      set_field(experiment, path.split("."), text, stage.name, f"--set={stage.name}.{path}")
    return resolve(experiment)

  def _text_of(self, experiment: Experiment) -> str:
    """Its settings, wherever the folder of all stages lies."""
    return write_experiment(experiment).replace(str(self._workdir), ".")

  def _work(self, stage: Stage, folder: pathlib.Path) -> None:
    assert stage.work is not None
    with processes.failing_together():
      if processes.is_first() and not folder.exists():
        with written_beside(folder) as beside:
          beside.mkdir()
          stage.work(self._folders(stage), beside)
      processes.wait(f"stage/{stage.name}")

  def _read(self) -> dict[str, dict[str, object]]:
    file = self._workdir / _STATE
    found = json.loads(file.read_text()) if file.exists() else {}
    processes.wait("stages")  # none writes before all have read
    return found

  def _write(
    self, state: dict[str, dict[str, object]], name: str, value: dict[str, object]
  ) -> None:
    state[name] = value
    if processes.is_first():
      write_atomically(self._workdir / _STATE, json.dumps(state, indent=2) + "\n")
