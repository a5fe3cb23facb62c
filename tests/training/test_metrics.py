"""Metrics files and the progress display."""

import io
import math

import jax
import jax.numpy as jnp
from rich.console import Console

from agentjax.training import compilation
from agentjax.training.metrics import (
  MetricsWriter,
  memory_in_use,
  plot_rewards,
  read_metrics,
)
from agentjax.training.progress import ProgressDisplay
from tests.training.figures import without_times


def test_resumed_file_reads_as_if_never_stopped(tmp_path):
  first = MetricsWriter(tmp_path, resume_step=0)
  for step in (1, 2, 3):
    first.write(step, "rl", {"reward/mean": step / 10, "time/step": 0.5})
  first.close()
  with (tmp_path / "metrics.jsonl").open("a") as f:
    f.write('{"step": 4, "rew')  # killed while writing
  second = MetricsWriter(tmp_path, resume_step=2)
  second.write(3, "rl", {"reward/mean": 0.3, "time/step": 0.1})
  second.close()
  rows = read_metrics(tmp_path / "metrics.jsonl")
  assert [r["step"] for r in rows] == [1, 2, 3]
  assert without_times(rows)[2] == {"step": 3, "stage": "rl", "reward/mean": 0.3}


def test_not_a_number_becomes_null_and_tensorboard_files_exist(tmp_path):
  writer = MetricsWriter(tmp_path, resume_step=0)
  writer.write(1, "rl", {"a": math.nan, "b": 2})
  writer.close()
  assert read_metrics(tmp_path / "metrics.jsonl")[0] == {
    "step": 1,
    "stage": "rl",
    "a": None,
    "b": 2.0,
  }
  assert list((tmp_path / "tensorboard").glob("events*"))


def test_plot_is_a_png(tmp_path):
  rows = [
    {"step": i, "stage": "rl", "reward/mean": i / 9, "policy/entropy": 1.0, "eval/greedy": 0.5}
    for i in range(10)
  ]
  plot_rewards(rows, tmp_path / "rewards.png", "title")
  assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


def test_time_left_leaves_out_what_the_clock_leaves_out():
  now = [0.0]
  out = io.StringIO()
  with ProgressDisplay(Console(file=out, width=100), {}, 0.0, clock=lambda: now[0]) as progress:
    progress.stage("rl", 5)
    now[0] += 2.0
    progress.update(1, {})
  assert "left 0:08" in out.getvalue()


def test_the_clock_stands_still_while_programs_are_compiled(monkeypatch):
  monkeypatch.setattr(compilation, "_spans", [])
  monkeypatch.setattr(compilation, "_closed", 0.0)
  now = [100.0]
  monkeypatch.setattr(compilation.time, "monotonic", lambda: now[0])
  compilation._note("/jax/core/compile/jaxpr_trace_duration", 2.0)  # 98 to 100, within the next
  now[0] = 103.0
  compilation._note("/jax/core/compile/jaxpr_trace_duration", 6.0)
  compilation._note("/jax/other", 50.0)
  now[0] = 110.0
  compilation._note("/jax/core/compile/backend_compile_duration", 4.0)
  assert compilation.seconds() == 10.0 and compilation.clock() == 100.0


def test_compiling_is_noticed():
  before = compilation.seconds()
  jax.jit(lambda x: x * 3 + 1)(jnp.arange(7.0)).block_until_ready()
  assert compilation.seconds() > before


def test_memory_of_this_process_is_known():
  assert 0.01 < memory_in_use()["memory/host_peak"] < 1000


def test_progress_shows_values_and_time_left_on_terminal_and_in_logs():
  for terminal in (True, False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with ProgressDisplay(console, {"reward/mean": "reward"}, line_seconds=0.0) as progress:
      progress.stage("reinforce", 4)
      for i in range(1, 5):
        progress.update(i, {"reward/mean": i / 4 if i != 2 else math.nan})
    text = out.getvalue()
    assert "reinforce" in text and "reward" in text and "left" in text and "4/4" in text
