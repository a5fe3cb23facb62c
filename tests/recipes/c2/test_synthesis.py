"""C2's rubrics from models behind an endpoint and on disk: resumed, refused, and trained on."""

import asyncio
import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig, JudgeRefusedError
from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer
from agentjax.adapters.judge_model import JudgeModelConfig
from agentjax.config import ConfigError
from agentjax.data import DataError, TaskSplits
from agentjax.engine import SamplingConfig
from agentjax.files import write_atomically
from agentjax.recipes.c2 import rubrics, runs, synthesis
from agentjax.recipes.c2.rubrics import C2Config
from agentjax.recipes.c2.runs import generator_rows, write_c2
from agentjax.recipes.c2.synthesis import (
  generator_config,
  judge_config,
  read_pairs,
  synthesise_rubrics,
)
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Extensions, Run, load_experiment, preferences
from agentjax.training.build import build_parts
from agentjax.training.experiment import resolve, write_experiment
from agentjax.training.metrics import read_metrics
from agentjax.training.preferences import TooLongError, preference_tasks
from tests.recipes.c2.scripted_endpoint import Endpoint
from tests.text.folders import write_model, write_vocabulary
from tests.training.smoke import quiet
from tests.training.stages import staged_experiment
from tests.training.teachers import MODEL, save_policy

pytest.importorskip("aiohttp", reason="needs the extra [web]")

_ROOT = pathlib.Path(__file__).parents[3]
_ROWS = [
  {"prompt": f"Name a prime above {i}.", "chosen": f"It is {i}1.", "rejected": f"It is {i}4, é."}
  for i in range(1, 6)
]
_CONFIG = C2Config(rubrics=4, rounds=2)


@pytest.fixture
def endpoint():
  made = Endpoint()
  yield made
  made.close()


@pytest.fixture
def pairs(tmp_path):
  file = tmp_path / "pairs.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
  return read_pairs(file, order_seed=13)


def _experiment(length=2048):
  made = staged_experiment(ScheduleConfig())
  made.model = dataclasses.replace(MODEL)
  made.engine = dataclasses.replace(
    made.engine, slots=4, extend_buckets=(256,), extend_rows=(4,), warmup=False
  )
  made.engine.max_length = made.rollout.max_total_tokens = length
  made.rl = dataclasses.replace(made.rl, row_length=length, microbatch_rows=2)
  return made


def _at(url, config):
  return dataclasses.replace(config, http=EndpointConfig(url, "big"))


def _synthesise(folder, pairs, url, *, concurrency=1, length=2048, **changes):
  settings = {
    "generator": _at(url, generator_config()),
    "judge": _at(url, judge_config()),
    "c2": _CONFIG,
  } | changes
  return synthesise_rubrics(
    _experiment(length), folder, pairs=pairs, concurrency=concurrency, **settings
  )


def _files(folder, but=("settings.json",)):
  return {
    str(file.relative_to(folder)): file.read_bytes()
    for file in sorted(folder.rglob("*"))
    if file.is_file() and file.name not in but
  }


def test_the_folder_holds_what_the_functions_give_pair_by_pair(endpoint, pairs, tmp_path):
  written = _synthesise(tmp_path / "one", pairs, endpoint.url)
  _synthesise(tmp_path / "many", pairs, endpoint.url, concurrency=4)
  assert _files(tmp_path / "one") == _files(tmp_path / "many")

  generator = HttpJudge(HttpJudgeConfig(endpoint.url, "big", temperature=1.0, top_p=0.9))
  judge = HttpJudge(HttpJudgeConfig(endpoint.url, "big", max_tokens=512))

  async def one_by_one():
    return [await rubrics.synthesise(pair, generator, judge, _CONFIG) for pair in pairs]

  found = asyncio.run(one_by_one())
  tasks = TaskSplits(preference_tasks(generator_rows(found, seed=0)), ())
  parts = build_parts(resolve(_experiment()), None, Extensions(tasks=tasks))
  assert write_c2(tmp_path / "by_hand", found, parts, seed=0) == written.data
  made = _files(tmp_path / "one")
  assert {n: made[n] for n in made if "/" in n} == _files(tmp_path / "by_hand")
  assert 0 < written.data.preferences < written.pairs == 5
  assert written.data.tasks == 3 * written.data.preferences and written.data.too_long == 0
  assert written.given_up == 0 and written.rubrics == sum(len(s.rubrics) for s in found)
  sampled = next(b for b in endpoint.seen if "Write a rubric" in b["messages"][1]["content"])
  assert (sampled["temperature"], sampled["top_p"], sampled["max_tokens"]) == (1.0, 0.9, 1024)


class _KilledError(BaseException):
  pass


def _killed_at(what, done):
  def report(stage, count, total):
    if (stage, count) == (what, done):
      raise _KilledError

  return report


def _die(*args, **kwargs):
  raise _KilledError


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rubrics", "margins", "verifier", "episodes"])
def test_killed_at_any_stage_it_goes_on_and_asks_nothing_twice(
  endpoint, pairs, tmp_path, stage, monkeypatch
):
  _synthesise(tmp_path / "whole", pairs, endpoint.url)
  asked = len(endpoint.seen)
  cut = tmp_path / "cut"
  with monkeypatch.context() as patch, pytest.raises(_KilledError):
    if stage == "verifier":
      write = write_atomically
      patch.setattr(
        runs,
        "write_atomically",
        lambda path, text: _die() if path.parent.name == stage else write(path, text),
      )
    if stage == "episodes":
      patch.setattr(preferences, "write_episodes", _die)
    _synthesise(cut, pairs, endpoint.url, report=_killed_at(stage, 2))
  for name in ("rubrics", "margins"):
    if (file := cut / f"{name}.jsonl").exists():
      with file.open("ab") as lines:
        lines.write(b'{"id": 4, "pai')  # as the process died
  resumed = _synthesise(cut, pairs, endpoint.url, concurrency=3).resumed
  assert resumed == {"rubrics": (2, 0), "margins": (5, 2)}.get(stage, (5, 5))
  assert len(endpoint.seen) == 2 * asked
  assert _files(cut, but=()) == _files(tmp_path / "whole", but=())
  again = _synthesise(cut, pairs, endpoint.url)
  assert again.resumed == (5, 5) and len(endpoint.seen) == 2 * asked
  assert _files(cut, but=()) == _files(tmp_path / "whole", but=())


def test_pairs_may_be_added_and_nothing_else_changed(endpoint, pairs, tmp_path):
  _synthesise(tmp_path / "a", pairs[:3], endpoint.url)
  assert _synthesise(tmp_path / "a", pairs, endpoint.url).resumed == (3, 3)
  patient = _at(endpoint.url, judge_config())
  patient.http.timeout = 900.0
  assert _synthesise(tmp_path / "a", pairs, endpoint.url, judge=patient).resumed == (5, 5)
  swapped = [dataclasses.replace(pairs[0], first="other"), *pairs[1:]]
  for given, changes, named in (
    (pairs, {"c2": C2Config(rubrics=3, rounds=2)}, "settings.c2.rubrics is 3 here and 4 there"),
    (pairs, {"judge": dataclasses.replace(patient, max_tokens=9)}, "settings.judge.max_tokens"),
    (swapped, {}, "pair 0 was another"),
    (pairs[1:], {}, "pair 0 is not among the pairs"),
  ):
    with pytest.raises(ConfigError, match=named):
      _synthesise(tmp_path / "a", given, endpoint.url, **changes)
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "rubrics.jsonl").write_text("{}\n")
  with pytest.raises(ConfigError, match="other files"):
    _synthesise(tmp_path / "b", pairs, endpoint.url)


@pytest.mark.parametrize(
  ("status", "values", "error", "named"),
  [
    (503, {}, JudgeUnavailableError, "answered 503"),
    (404, {"error": "no model"}, JudgeRefusedError, r"pair 2, margins: .* answered 404"),
    (200, {"choices": [{"message": {}}]}, JudgeRefusedError, "pair 2, margins: .* has no text"),
  ],
)
def test_an_endpoint_that_fails_stops_the_work_which_then_goes_on(
  endpoint, pairs, tmp_path, status, values, error, named
):
  def fault(number, body):
    broken = _ROWS[2]["prompt"] in body["messages"][1]["content"] and body["max_tokens"] == 512
    return (status, values) if broken else None

  endpoint.fault = fault
  with pytest.raises(error, match=named):
    _synthesise(tmp_path / "a", pairs, endpoint.url)
  assert not (tmp_path / "a" / "episodes").exists()
  endpoint.fault = lambda number, body: None
  assert _synthesise(tmp_path / "a", pairs, endpoint.url).resumed == (5, 2)
  _synthesise(tmp_path / "b", pairs, endpoint.url)
  assert _files(tmp_path / "a") == _files(tmp_path / "b")


def test_a_pair_of_which_nothing_is_told_is_given_up_alone(endpoint, pairs, tmp_path):
  whole = _synthesise(tmp_path / "a", pairs, endpoint.url).data.preferences
  kept = json.loads((tmp_path / "a/generator/train.jsonl").read_text().splitlines()[0])
  told = [{"token": "C", "logprob": -0.1}]

  def fault(number, body):
    named = next(r["prompt"] for r in _ROWS if r["prompt"] in kept["messages"][1]["content"])
    if body.get("logprobs") and named in body["messages"][1]["content"]:
      return 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": told}]}}]}

  endpoint.fault = fault
  written = _synthesise(tmp_path / "b", pairs, endpoint.url)
  assert (written.given_up, written.data.preferences) == (1, whole - 1)
  (lost,) = map(json.loads, (tmp_path / "b/given_up.jsonl").read_text().splitlines())
  assert "none of ['A', 'B'] is among the tokens told" in lost["reason"]


@pytest.mark.parametrize(
  ("status", "most_tokens", "stage"), [(400, 1024, "rubrics"), (422, 512, "margins")]
)
def test_a_pair_whose_request_is_refused_is_given_up_alone(
  endpoint, pairs, tmp_path, status, most_tokens, stage
):
  def fault(number, body):
    asked = _ROWS[2]["prompt"] in body["messages"][1]["content"]
    return (status, {}) if asked and body["max_tokens"] == most_tokens else None

  endpoint.fault = fault
  assert _synthesise(tmp_path, pairs, endpoint.url, concurrency=4).given_up == 1
  (lost,) = map(json.loads, (tmp_path / "given_up.jsonl").read_text().splitlines())
  assert lost["id"] == 2 and re.match(rf"{stage}: .* answered {status}", lost["reason"])


def test_what_cannot_be_trained_on_is_said(endpoint, pairs, tmp_path):
  one_word = {"choices": [{"message": {"content": "<analyze></analyze>\n1. Safety: Is it kind?"}}]}
  endpoint.fault = lambda n, body: (200, one_word) if body["max_tokens"] == 1024 else None
  with pytest.raises(DataError, match=r"none of 5 pairs was kept.* 20 of 20 rubrics"):
    _synthesise(tmp_path / "a", pairs, endpoint.url)
  endpoint.fault = lambda number, body: None
  kept = _synthesise(tmp_path / "b", pairs, endpoint.url).data.preferences
  with pytest.raises(TooLongError, match=rf"{kept} pairs .* config.rl.row_length=860 allows 0"):
    _synthesise(tmp_path / "b", pairs, endpoint.url, length=860)
  asked = len(endpoint.seen)
  with pytest.raises(ConfigError, match="config.rollout.max_total_tokens=128"):
    _synthesise(tmp_path / "c", pairs, endpoint.url, length=128)
  assert len(endpoint.seen) == asked


def test_pairs_too_long_for_the_generators_rows_are_left_to_the_verifier(endpoint, pairs, tmp_path):
  longer = [dataclasses.replace(pair, first="x" * 2000) for pair in pairs[:3]] + pairs[3:]
  whole = _synthesise(tmp_path / "a", longer, endpoint.url, length=8192)
  short = _synthesise(tmp_path / "a", longer, endpoint.url, length=2048)
  assert short.resumed == (5, 5) and short.data.tasks == whole.data.tasks
  assert short.data.too_long == whole.data.preferences - short.data.preferences > 0


def test_models_on_disk_write_and_judge(endpoint, pairs, tmp_path):
  """One policy in both parts, as the source has it, is loaded once."""
  save_policy(tmp_path / "run", MODEL, 0)
  write_atomically(tmp_path / "run/config.json", write_experiment(_experiment()))
  on_disk = JudgeModelConfig(str(tmp_path / "run"), SamplingConfig(temperature=1.0), 8)
  small = C2Config(rubrics=2, rounds=1)
  with pytest.raises(DataError, match="0 of 4 rubrics could be read"):
    _synthesise(
      tmp_path / "a", pairs[:2], "", generator=on_disk, judge=on_disk, c2=small, concurrency=2
    )
  margins = [json.loads(line) for line in (tmp_path / "a/margins.jsonl").read_text().splitlines()]
  assert len({row["without"] for row in margins}) == 2
  settings = json.loads((tmp_path / "a/settings.json").read_text())
  assert settings["generator"] == settings["judge"] and settings["judge"]["policy"]
  longer = [dataclasses.replace(pairs[0], first="x" * 2000), pairs[1]]
  with pytest.raises(DataError, match="1 pairs were given up"):
    _synthesise(tmp_path / "b", longer, endpoint.url, judge=on_disk, c2=small)
  (lost,) = map(json.loads, (tmp_path / "b/given_up.jsonl").read_text().splitlines())
  assert lost["id"] == 0 and re.match("margins: .*max_length", lost["reason"])


@pytest.mark.parametrize(
  ("row", "named"),
  [
    ({"chosen": "a", "rejected": "b"}, "no 'prompt'"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "same text"),
    ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, "'chosen' is a list"),
    ({"prompt": [{"role": "owl", "content": "q"}], "chosen": "a", "rejected": "b"}, "role 'owl'"),
    ({"prompt": [], "chosen": "a", "rejected": "b"}, "'prompt' is empty"),
    ({"id": 3, "prompt": "q", "chosen": "a", "rejected": "b"}, "'id' is 3"),
  ],
)
def test_a_pair_that_does_not_fit_is_refused_with_line_and_field(tmp_path, row, named):
  file = tmp_path / "pairs.jsonl"
  file.write_text(json.dumps(_ROWS[0]) + "\n" + json.dumps(row) + "\n")
  with pytest.raises(DataError, match=named) as caught:
    read_pairs(file, order_seed=13)
  assert caught.value.line == 2


def test_pairs_have_an_order_and_may_have_ids_and_turns(tmp_path):
  file = tmp_path / "pairs.jsonl"
  turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a\ud800"}]
  rows = [{"id": 7 * i, "prompt": turns, "chosen": "c", "rejected": "r"} for i in range(20)]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  read = read_pairs(file, order_seed=13)
  assert [pair.id for pair in read] == [7 * i for i in range(20)]
  assert {pair.label for pair in read} == {"A", "B"}
  assert [m.content for m in read[0].question] == ["q", "a?"]
  assert read != read_pairs(file, order_seed=14)


def test_impossible_settings_name_the_field():
  for config, named in (
    (JudgeModelConfig(), "judge.path=''"),
    (JudgeModelConfig("a", http=EndpointConfig("http://x/v1", "m")), "judge.path='a'"),
    (JudgeModelConfig("a", max_tokens=0), "judge.max_tokens=0"),
    (JudgeModelConfig(http=EndpointConfig("http://x/v1")), "judge.http.model"),
    (
      JudgeModelConfig("", SamplingConfig(top_k=5), http=EndpointConfig("http://x/v1", "m")),
      "judge.sampling.top_k=5",
    ),
  ):
    with pytest.raises(ConfigError, match=named):
      config.validate("judge")


def _recipe(name, folder, **rl):
  """A bundled recipe at the size of the folder, in float32."""
  made = load_experiment(_ROOT / "configs" / f"{name}.py")
  made.pretrained = str(folder)
  made.model.compute_dtype, made.model.remat = "float32", "none"
  made.engine = dataclasses.replace(
    made.engine, slots=4, extend_buckets=(256,), extend_rows=(4,), warmup=False
  )
  made.engine.max_length = made.rollout.max_total_tokens = 2048
  made.rollout.max_tokens_per_turn = 8
  made.rl = dataclasses.replace(made.rl, row_length=2048, microbatch_rows=2, **rl)
  return made


@pytest.mark.slow
def test_the_recipes_run_from_pairs_to_generator_and_verifier(endpoint, pairs, tmp_path):
  """A Hugging Face folder writes the rubrics, and both runs start from it."""
  folder, out = tmp_path / "qwen3", tmp_path / "c2"
  texts = [f"<analyze>hm</analyze>\n1. Safety: Is it {word}?" for word in ("kind", "loud")]
  write_vocabulary(folder, corpus=tuple(texts), vocab_size=400, split=False)
  tokenizer = HuggingFaceTokenizer(folder)
  ids = [tokenizer.encode(rubric) for rubric in texts]
  assert [len(one) for one in ids] == [1, 1]
  (start,) = {tokenizer.encode("\n\n")[-1]}
  stop = tokenizer.controls["<|im_end|>"]
  write_model(folder, tokenizer, [pair for (one,) in ids for pair in ((start, one), (one, stop))])
  data = synthesise_rubrics(
    _recipe("c2_generator", folder),
    out,
    pairs=pairs,
    generator=dataclasses.replace(generator_config(), path=str(folder), max_tokens=8),
    judge=_at(endpoint.url, judge_config()),
    c2=_CONFIG,
  ).data
  assert data.preferences >= 3
  written = {r for row in map(json.loads, open(out / "rubrics.jsonl")) for r in row["rubrics"]}
  assert written == set(texts)

  made = _recipe("c2_generator", folder, steps=2, tasks_per_step=data.preferences)
  made.rl.rollouts, made.data.path = str(out / "episodes"), str(out / "generator")
  assert Run(made, tmp_path / "g", console=quiet()).train().finished
  first = read_metrics(tmp_path / "g/metrics.jsonl")[0]
  assert first["preference/loss"] == pytest.approx(0.6931, abs=1e-3)

  made = _recipe("c2_verifier", folder, steps=1, tasks_per_step=2)
  made.data.path = str(out / "verifier")
  assert Run(made, tmp_path / "v", console=quiet()).train().finished
  row = read_metrics(tmp_path / "v/metrics.jsonl")[0]
  assert row[f"reward/part_{rubrics.REWARD_PARTS[2]}"] == -1.0  # it writes rubrics and no verdicts
  assert row["reward/mean"] < 0


def _command(folder, *flags, **options):
  return subprocess.Popen(
    [sys.executable, "-m", "agentjax.recipes.c2.synthesise", *flags],
    cwd=folder,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )


@pytest.mark.slow
def test_the_command_is_killed_and_goes_on(endpoint, pairs, tmp_path):
  (tmp_path / "config.json").write_text(write_experiment(_experiment()))
  flags = ["--config=config.json", "--pairs=pairs.jsonl", "--output=c2"]
  flags += ["--c2.rubrics=4", "--c2.rounds=2", "--concurrency=2"]
  for name in ("generator", "judge"):
    flags += [f"--{name}.http.base_url={endpoint.url}", f"--{name}.http.model=big"]

  def slowly(number, body):
    time.sleep(0.05)

  endpoint.fault = slowly
  for name in (synthesis.RUBRICS, synthesis.MARGINS):
    process = _command(tmp_path, *flags)
    while process.poll() is None and not (tmp_path / "c2" / name).exists():
      time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  out, err = (process := _command(tmp_path, *flags)).communicate(timeout=300)
  assert process.returncode == 0, err
  assert "preferences for the generator" in out and "margins 5/5" in out
  _synthesise(tmp_path / "whole", pairs, endpoint.url)
  assert _files(tmp_path / "c2", but=()) == _files(tmp_path / "whole", but=())

  for more, named in (
    (["--c2.rubrics=5"], "settings.c2.rubrics is 5 here and 4 there"),
    (["--predictor=x.npy"], "Unknown command line flag 'predictor'"),
    (["--pairs="], "--pairs=''"),
    (["--pairs=none.jsonl"], "no such file"),
    (["--judge.path=x"], "judge.path='x'"),
  ):
    _, err = (process := _command(tmp_path, *flags, *more)).communicate(timeout=300)
    assert process.returncode == 2 and named in err and "Traceback" not in err
