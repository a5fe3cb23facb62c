"""Command-line overrides: typed, checked against the tree, one-line errors, JSON round trip."""

import json
import pathlib
import subprocess
import sys

import pytest
from absl import flags

from agentjax.config import ConfigError
from agentjax.models.lora import LoraConfig
from agentjax.objectives import ObjectiveConfig, preset
from agentjax.training import Experiment, load_experiment
from agentjax.training.experiment import resolve, write_experiment
from agentjax.training.flags import (
  check_overrides,
  define_config_flag,
)
from tests.size import num_leaves

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_project(monkeypatch):
  monkeypatch.chdir(_ROOT)


def _resolve(*arguments: str) -> Experiment:
  argv = ["program", "--config=configs/quickstart.py", *arguments]
  values = flags.FlagValues()
  check_overrides(argv)
  holder = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  return resolve(holder.value)


def test_overrides_reach_every_kind_of_field():
  config = _resolve(
    "--config.rl.optimizer.learning_rate=1e-5",
    "--config.rl.optimizer.clip_norm=none",
    "--config.rl.objective.advantage.centre=leave_one_out",
    "--config.evaluation.pass_at=1,2",
    "--config.data.source.levels=(1,2)",
    "--config.model.rope_theta=10000",
    "--config.model.tie_embeddings=true",
    "--config.name=b c",
  )
  config = config.to_dict()
  assert config["rl"]["optimizer"]["learning_rate"] == 1e-5
  assert config["rl"]["optimizer"]["clip_norm"] is None
  assert config["rl"]["objective"]["advantage"]["centre"] == "leave_one_out"
  assert config["evaluation"]["pass_at"] == [1, 2]
  assert config["data"]["source"]["levels"] == [1, 2]
  assert (config["model"]["rope_theta"], config["model"]["tie_embeddings"]) == (10000.0, True)
  assert config["name"] == "b c"


def test_a_field_of_a_part_that_is_none_makes_the_part():
  """The others of the part have their defaults; a part inside a part is made as well."""
  plain = _resolve()
  assert plain.lora is None and plain.model.mtp is None
  config = _resolve("--config.lora.rank=4", "--config.model.mtp.depths=2")
  assert (config.lora.rank, config.lora.alpha) == (4, LoraConfig().alpha)
  assert config.model.mtp.depths == 2
  assert load_experiment(_ROOT / "configs" / "quickstart.py").lora is None


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--config.rl.objective=dappo", "config.rl.objective='dappo'; allowed: 'default', "),
    ("--config.sandboxes.big.image=x", "set --config.sandboxes.big=NAME before it"),
    ("--config.sandboxes.big=chroot", "config.sandboxes.big='chroot'; allowed: 'embedded'"),
    ("--config.tools.settings.python.sandbox=lost", "python.sandbox='lost'; allowed: a name in"),
    ("--config.tools.settings.python.image=x", "settings.python (python) has no field 'image'"),
    ("--config.tools.settings.shell.max_characters=9", "config.tools.settings='shell'; allowed"),
    ("--config.lora=yes", "config.lora='yes'; allowed: 'default', or its fields"),
    ("--config.lora.rank=0", "config.lora.rank=0"),
    ("--config.rl.optimiser.learning_rate=1", "config.rl has no field 'optimiser'; did you mean"),
    ("--config.rl.optimizer.learning_rate=fast", "'fast'"),
    ("--config.rl.objective.advantage.centre=middle", "one of 'none', 'group_mean'"),
    ("--config.seed.x=1", "config.seed is a single value"),
    ("--config.rollout.group_size=1", "config.rollout.group_size=1"),
    ("--config.rl.minibatches=3", "config.rl.minibatches=3; allowed: a divisor of"),
    ("--config.rollout.max_total_tokens=100000", "at most engine.max_length"),
    ("--config.rollout.grammar=tool_calls", "engine.grammar_states"),
    ("--config.mesh.data=3", "config.supervised.microbatch_rows="),
    ("--config.rl.optimizer.learning_rate=-1", "config.rl.optimizer.learning_rate=-1"),
  ],
)
def test_bad_settings_are_refused_by_name(flag, message):
  with pytest.raises((ConfigError, flags.Error)) as caught:
    _resolve(flag)
  assert message in str(caught.value)


def test_the_command_line_shows_one_line_and_no_traceback(tmp_path):
  for flag in ("--config.rl.stepz=1", "--config.rollout.group_size=1"):
    done = subprocess.run(
      [
        sys.executable,
        "-m",
        "agentjax.train",
        "--config=configs/quickstart.py",
        f"--workdir={tmp_path / 'w'}",
        flag,
      ],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=120,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: config.r")
    assert "Traceback" not in done.stderr and not (tmp_path / "w").exists()


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("nowhere.py", "no such file"),
    ("pyproject.toml", "allowed: a .py file"),
    ("agentjax/__init__.py", "defines no get_config"),
  ],
)
def test_a_file_that_is_no_config_is_refused(path, message):
  with pytest.raises(ConfigError, match=message):
    load_experiment(path)


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("exits.py", "raise SystemExit(0)", "exits.py' fails: SystemExit: 0"),
    (
      "asks.py",
      "def get_config():\n  import sys; sys.exit('no')",
      "asks.py' fails: SystemExit: no",
    ),
    ("deep.json", "[" * 100_000, "deep.json' is not JSON"),
  ],
)
def test_a_config_that_ends_its_reader_is_refused(tmp_path, name, text, message):
  (tmp_path / name).write_text(text)
  with pytest.raises(ConfigError, match=message):
    load_experiment(tmp_path / name)


def test_resolved_json_is_the_same_experiment(tmp_path):
  original = load_experiment(str(_ROOT / "configs/quickstart.py"))
  file = tmp_path / "config.json"
  file.write_text(write_experiment(original))
  assert load_experiment(str(file)) == original
  values = json.loads(write_experiment(original))
  values["rl"]["stepz"] = 3
  file.write_text(json.dumps(values))
  with pytest.raises(ConfigError, match=r"config\.rl has no field stepz"):
    load_experiment(str(file))


def test_a_saved_config_is_a_page_that_a_person_reads():
  written = write_experiment(load_experiment(str(_ROOT / "configs/quickstart.py")))
  assert len(written) <= 10_000 and num_leaves(json.loads(written)) <= 250
  assert '"clip_high": 0.28' in written and '"clip_low"' not in written  # that is the default


def test_a_config_of_an_earlier_version_is_refused_with_what_to_do(tmp_path):
  file = tmp_path / "config.json"
  old = {"name": "old", "environment": {"kind": "question"}}
  for format, shown in (({}, "None"), ({"format": 1}, "1")):
    file.write_text(json.dumps(format | old))
    with pytest.raises(ConfigError, match=rf'"format": {shown}; allowed: 2.*--config=FILE.py'):
      load_experiment(str(file))


def test_an_algorithm_is_chosen_by_flag_and_then_set():
  plain = _resolve("--config.rl.objective=default")
  assert plain.rl.objective == ObjectiveConfig()
  chosen = _resolve(
    "--config.rl.objective=dapo",
    "--config.rl.objective.policy_loss.clip_high=.3",
    "--config.rl.objective.policy_loss.entropy_coefficient=.01",
  )
  wanted = preset("dapo")
  wanted.policy_loss.clip_high, wanted.policy_loss.entropy_coefficient = 0.3, 0.01
  assert chosen.rl.objective == wanted != preset("dapo")
  assert preset("dapo").policy_loss.clip_high == 0.28  # the preset itself is as it was


def test_optional_parts_are_absent_until_a_flag_names_them():
  plain = _resolve()
  assert not plain.tools.settings and list(plain.sandboxes) == ["default"]
  config = _resolve(
    "--config.tools.settings.python.stateful=true",
    "--config.tools.settings.python.sandbox=boxes",
    "--config.sandboxes.boxes=podman",
    "--config.sandboxes.boxes.image=mine",
    "--config.sandboxes.boxes.limits.wall_seconds=5",
    "--config.lora=default",
  )
  python, boxes = config.tools.settings["python"], config.sandboxes["boxes"]
  assert (python.stateful, python.sandbox) == (True, "boxes")
  assert (boxes.chosen, boxes.image, boxes.limits.wall_seconds) == ("podman", "mine", 5.0)
  assert config.lora == LoraConfig()
  saved = json.loads(write_experiment(config))
  assert saved["sandboxes"]["boxes"] == {
    "use": "podman",
    "image": "mine",
    "limits": {"wall_seconds": 5.0},
  }
  with pytest.raises(ConfigError, match="frozen"):
    config.sandboxes["more"] = boxes


def test_unknown_fields_name_near_ones():
  with pytest.raises(ConfigError, match="did you mean learning_rate"):
    check_overrides(["x", "--config.rl.optimizer.learning_rat=1"])


@pytest.mark.parametrize("config", sorted(_ROOT.glob("configs/*.py")), ids=lambda p: p.stem)
def test_every_config_is_valid_and_names_its_command(config, tmp_path):
  experiment = load_experiment(str(config))
  if experiment.data.path is None and getattr(experiment.data.source, "reads_path", False):
    experiment.data.path = str(tmp_path)
  if "--config.data.path=DIR" in config.read_text().split('"""')[1]:
    experiment.data.path = str(tmp_path)
  if experiment.tokenizer.kind == "huggingface":
    with pytest.raises(ConfigError, match="set --config.pretrained=DIR"):
      experiment.validate()
    experiment.tokenizer.path = str(tmp_path)
  experiment.validate()
  assert f"--config=configs/{config.name}" in config.read_text().split('"""')[1]


@pytest.mark.parametrize(
  "module",
  [
    "train",
    *(
      pytest.param(module, marks=pytest.mark.slow)
      for module in (
        "evaluate",
        "recipes.pivotrl.mine",
        "recipes.c2.synthesise",
        "recipes.tessy.synthesise",
        "train_tokenizer",
      )
    ),
  ],
)
def test_help_of_every_entry_point_names_its_flags(module):
  done = subprocess.run(
    [sys.executable, "-m", f"agentjax.{module}", "--help"],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  wanted = {
    "train": ["--config", "--workdir", "--replay_step"],
    "evaluate": ["--config", "--checkpoint", "--output"],
    "recipes.pivotrl.mine": ["--config", "--trajectories", "--samples", "--max_mean"],
    "recipes.tessy.synthesise": ["--config", "--predictor", "--teacher", "--output"],
    "recipes.c2.synthesise": ["--config", "--pairs", "--judge", "--output"],
    "train_tokenizer": ["--input", "--output", "--vocab_size"],
  }[module]
  assert all(flag in done.stdout for flag in wanted), done.stdout + done.stderr
