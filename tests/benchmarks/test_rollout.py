"""The benchmark of rollouts: its traces, and that every part runs and prints what it promises."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import rollout

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
PEER = """
import json, sys
what = sys.argv[1].split("=")[1]
print("# some words of its own")
if what == "sampler":
  print(json.dumps({"best_s": 1.0, "median_s": 2.0, "cpu_s_median": 3.0, "tokens": 16}))
if what == "agentic":
  print(json.dumps({"step_s_median": 9.0, "step_cpu_s_median": 7.0}))
if what == "gen":
  for model in ("qwen3", "nemotron_h"):
    print(json.dumps({"model": model, "completion": 4, "gen_s": 2.0, "best_gen_s": 1.0,
                      "cpu_gen_s": 1.5, "step_s_median": 4.0, "best_step_s": 3.0,
                      "cpu_step_s": 3.5}))
"""


def run(part: str, *arguments: str) -> list[str]:
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(ROOT / "benchmarks" / "rollout.py"), "--tiny", f"--part={part}"]
  done = subprocess.run(
    [*command, "--rounds=1", "--repeats=1", *arguments],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout.splitlines()[2:]


@pytest.fixture
def peer(tmp_path):
  script = tmp_path / "peer.py"
  script.write_text(PEER)
  return str(script)


def test_a_trace_comes_back_as_it_was_written(tmp_path):
  streams = rollout.make_trace(rollout.TRACES["small"])
  path = str(tmp_path / "trace.jsonl")
  rollout.write_trace(path, streams)
  assert rollout.read_trace(path) == streams
  first = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[0])
  assert set(first) == {"group", "stream", "prompt_len", "out_lens", "obs_lens"}


@pytest.mark.parametrize("kind", sorted(rollout.TRACES))
def test_traces_that_are_made_up_keep_their_bounds(kind):
  bounds = rollout.TRACES[kind]
  streams = rollout.make_trace(bounds)
  assert streams == rollout.make_trace(bounds) != rollout.make_trace(bounds, seed=1)
  assert len(streams) == bounds.groups * bounds.streams
  for group in range(bounds.groups):
    assert len({s.prompt_len for s in streams if s.group == group}) == 1
  for values, (low, high) in (
    ([s.prompt_len for s in streams], bounds.prompt),
    ([len(s.out_lens) for s in streams], bounds.turns),
    ([n for s in streams for n in s.out_lens], bounds.out),
    ([n for s in streams for n in s.obs_lens], bounds.observed),
  ):
    assert low <= min(values) and max(values) <= high


def test_new_tokens_count_a_prompt_once_a_group():
  streams = [
    rollout.Stream(group, stream, 10, (4, 4), (3,)) for group in (0, 1) for stream in (0, 1)
  ]
  assert rollout.new_tokens(streams) == 2 * 10 + 4 * 3


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "line 2"),
    ('{"group": 0, "stream": 0, "prompt_len": 3, "out_lens": [1]}', "line 2: 'obs_lens'"),
    (
      '{"group": 0, "stream": 0, "prompt_len": 3, "out_lens": [1], "obs_lens": [1]}',
      "1 turns and 1 observations",
    ),
    (
      '{"group": 0, "stream": 0, "prompt_len": 0, "out_lens": [1], "obs_lens": []}',
      "lengths must be >= 1",
    ),
  ],
)
def test_a_line_that_is_no_stream_is_named(tmp_path, line, message):
  good = '{"group": 0, "stream": 0, "prompt_len": 3, "out_lens": [1], "obs_lens": []}'
  path = tmp_path / "trace.jsonl"
  path.write_text(f"{good}\n{line}\n")
  with pytest.raises(ValueError, match=message):
    rollout.read_trace(str(path))


def test_tools_have_a_heavy_tail_that_is_cut_off():
  seconds = rollout.tool_seconds(1000, 3, 2.0)
  assert seconds.min() >= 0 and seconds.max() == 2.0
  assert np.median(seconds) < 0.1 * seconds.max() and 0.001 < np.mean(seconds == 2.0) < 0.05


def test_single_turns_and_agents_stand_beside_a_peer(peer):
  given = (f"--tunix_python={sys.executable}", f"--tunix_script={peer}")
  lines = run("single", "--part=agentic", *given)
  assert [" tunix " in line for line in lines] == [False, True, False] * 2
  assert "tokens/s" in lines[0] and lines[1].split()[-2:] == ["16", "tokens/s"]
  assert "9.000     9.000     7.000" in lines[4]
  assert all("ours / theirs" in lines[i] for i in (2, 5))


def test_traces_slow_tools_and_the_host_print_their_figures(tmp_path):
  kept = tmp_path / "kept.jsonl"
  lines = run("trace", "--part=latency", "--part=host", f"--write_trace={kept}")
  assert len(rollout.read_trace(str(kept))) == 4
  ratios = [line.split("= ")[1].split(";")[0] for line in lines if "taken in / new" in line]
  assert len(ratios) == 2 and all(1.0 <= float(r) <= 1.05 for r in ratios)
  assert sum("wall / ideal" in line for line in lines) == 1
  assert sum("ms of CPU a turn" in line for line in lines) == 2


def test_a_whole_step_stands_beside_a_peer(peer):
  lines = run("step", f"--trl_python={sys.executable}", f"--trl_script={peer}")
  assert len(lines) == 2 * (3 + 2 * 2)
  assert sum(" trl " in line for line in lines) == 4


def test_a_peer_that_fails_is_an_error(tmp_path):
  broken = tmp_path / "broken.py"
  broken.write_text("raise SystemExit('no model')")
  with pytest.raises(RuntimeError, match="(?s)ended with 1 and 0 results.*no model"):
    rollout.peer_rows(sys.executable, str(broken), ["--what=sampler"])
