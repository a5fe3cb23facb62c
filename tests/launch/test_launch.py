"""Launch scripts start the command that was given, on every host, and say what they would do."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_pod_dry_run_prints_one_command_for_all_workers():
  done = _run(
    "launch/tpu_pod.sh",
    "--tpu=pod",
    "--zone=z",
    "--project=p",
    "--setup",
    "--dry_run",
    "-m",
    "agentjax.train",
    "--distributed",
    "--config=configs/quickstart.py",
    "--workdir=a b",
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == 4 and lines[0].startswith("git archive")
  assert all("--worker=all" in line and "--project=p" in line for line in lines[1:])
  assert "--distributed" in lines[-1] and "a\\\\\\ b" in lines[-1]


@pytest.mark.parametrize("missing", ["--tpu=a", "--zone=b"])
def test_pod_needs_a_name_and_a_zone(missing):
  done = _run("launch/tpu_pod.sh", missing, "--dry_run", "-m", "agentjax.train")
  assert done.returncode == 2 and "is missing" in done.stderr


def test_local_forces_devices_and_refuses_nonsense():
  done = _run("launch/local.sh", "--dry_run", "--devices=8", "-m", "agentjax.train")
  assert "xla_force_host_platform_device_count=8" in done.stdout
  assert _run("launch/local.sh", "--devices=no", "-m", "agentjax.train").returncode == 2


def test_local_runs_the_command():
  import os
  import sys

  done = subprocess.run(
    ["launch/local.sh", "-c", "print('ran')"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env={**os.environ, "AGENTJAX_PYTHON": sys.executable},
    timeout=60,
  )
  assert done.stdout.strip() == "ran", done.stderr


@pytest.mark.parametrize("script", ["launch/local.sh", "launch/tpu_pod.sh"])
def test_help_names_the_dry_run(script):
  done = _run(script, "--help")
  assert done.returncode == 0 and "--dry_run" in done.stdout
