"""Launch scripts start the command that was given, on every host, and say what they would do."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
POD = ("--tpu=pod", "--zone=z")


def _run(
  *command: str, folder: pathlib.Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    command,
    cwd=folder,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=60,
  )


def _program(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("#!/usr/bin/env bash\nset -eu\n" + text)
  path.chmod(0o755)


@pytest.fixture
def pod(tmp_path):
  """A checkout with the launch scripts, one host (a folder), and a gcloud that serves it."""
  checkout, host = tmp_path / "checkout", tmp_path / "host"
  (checkout / "sub folder").mkdir(parents=True)
  (checkout / "sub folder" / "here.txt").write_text("found")
  host.mkdir()
  for script in ("common.sh", "local.sh", "tpu_pod.sh"):
    _program(checkout / "launch" / script, "")
    (checkout / "launch" / script).write_text((ROOT / "launch" / script).read_text())
  (checkout / "package.py").write_text("version = 'committed'")
  git = ("git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b")
  subprocess.run([*git, "init", "--quiet"], check=True)
  subprocess.run([*git, "add", "."], check=True)
  subprocess.run([*git, "commit", "--quiet", "--message=all"], check=True)
  programs = tmp_path / "programs"
  _program(
    programs / "gcloud",
    f"""cd {host}
for word in "$@"; do
  case "$word" in
    *.tar.gz) [ -f "$word" ] && cp "$word" agentjax.tar.gz ;;
    --command=*) exec bash -c "${{word#--command=}}" ;;
  esac
done
exit 0
""",
  )
  _program(
    programs / "make",
    'mkdir -p .venv/bin && printf "#!/bin/sh\\n" > .venv/bin/pip && chmod +x .venv/bin/pip\n',
  )
  path = f"{programs}:{os.environ['PATH']}"

  def launch(*words: str, folder: str = "."):
    script = str(checkout / "launch" / "tpu_pod.sh")
    return _run(script, *POD, *words, folder=checkout / folder, PATH=path)

  launch.checkout = checkout  # type: ignore[attr-defined]
  return launch


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
  assert len(lines) == 4 and lines[0].startswith("tar ")
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


def test_local_runs_where_it_is_called_from(tmp_path):
  code = "import agentjax, os; print(os.getcwd(), agentjax.__file__)"
  done = _run(
    str(ROOT / "launch/local.sh"), "-c", code, folder=tmp_path, AGENTJAX_PYTHON=sys.executable
  )
  assert done.stdout.split() == [str(tmp_path), str(ROOT / "agentjax/__init__.py")], done.stderr


@pytest.mark.parametrize("word", ["--dryrun", "--tpu", "-tpu=pod", "--device=8", "train", "--"])
@pytest.mark.parametrize("script", [("launch/local.sh",), ("launch/tpu_pod.sh", *POD, "--setup")])
def test_a_mistyped_option_starts_nothing(script, word, tmp_path):
  _program(tmp_path / "gcloud", f"touch {tmp_path}/called")
  path = f"{tmp_path}:{os.environ['PATH']}"
  done = _run(*script, word, "-m", "agentjax.train", PATH=path)
  assert done.returncode == 2 and word in done.stderr.splitlines()[0]
  assert not (tmp_path / "called").exists()


def test_pod_gets_uncommitted_and_new_files_and_warns_where_they_differ(pod):
  read = ("-c", "import package, os; print(package.version, os.path.exists('new.py'))")
  (pod.checkout / "package.py").write_text("version = 'changed'")
  (pod.checkout / "new.py").write_text("")
  done = pod("--setup", *read)
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["changed", "True"] and "2 uncommitted" in done.stderr
  assert "warning" not in done.stderr
  assert "warning" not in pod(*read).stderr
  (pod.checkout / "package.py").write_text("version = 'changed again'")
  later = pod(*read)
  assert later.stdout.split() == ["changed", "True"] and "--setup copies it" in later.stderr


def test_pod_starts_in_the_callers_folder_without_a_virtual_environment(pod):
  assert pod("--setup").returncode == 0
  done = pod("-c", "import package; print(open('here.txt').read())", folder="sub folder")
  assert done.stdout.strip() == "found", done.stderr


@pytest.mark.parametrize("script", ["launch/local.sh", "launch/tpu_pod.sh"])
def test_help_names_the_dry_run(script):
  done = _run(script, "--help")
  assert done.returncode == 0 and "--dry_run" in done.stdout
