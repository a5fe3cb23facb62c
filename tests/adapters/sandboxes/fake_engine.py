"""Stands for the client of a container engine: ``fake_engine.py STATE ARGUMENTS...``.

A container is a folder below STATE; what is run "in" it runs on this machine, without any wall. The
argument list of each call is a line of STATE/calls.jsonl.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

MARK = "AGENTJAX_FAKE_CONTAINER"
WITH_VALUE = {
  *("--name", "--label", "--network", "--cap-drop", "--ipc", "--security-opt", "--user", "--pull"),
  *("--pids-limit", "--memory", "--memory-swap", "--cpus", "--runtime", "--tmpfs", "--env"),
  *("--workdir", "--entrypoint", "--filter", "--format"),
}


def parse(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
  """Options (name -> values) and the rest."""
  options: dict[str, list[str]] = {}
  at = 0
  while at < len(arguments) and arguments[at].startswith("--"):
    name = arguments[at]
    takes = name in WITH_VALUE
    options.setdefault(name, []).append(arguments[at + 1] if takes else "")
    at += 2 if takes else 1
  return options, arguments[at:]


def end_processes(mark: str) -> None:
  """Kills the processes whose environment has the mark; all that "kill -9 -1" means here."""
  for entry in os.listdir("/proc"):
    if entry.isdigit() and int(entry) != os.getpid():
      try:
        environment = pathlib.Path(f"/proc/{entry}/environ").read_bytes()
        if f"{MARK}={mark}".encode() in environment.split(b"\0"):
          os.kill(int(entry), signal.SIGKILL)
      except OSError:
        continue


def fail(code: int, message: str) -> None:
  print(f"Error: {message}", file=sys.stderr)
  sys.exit(code)


def run(state: pathlib.Path, options: dict[str, list[str]], rest: list[str]) -> None:
  if rest[0] == "absent":
    fail(125, f"{rest[0]}: image not known")
  box = state / options["--name"][0]
  (box / "work").mkdir(parents=True)
  (box / "env").write_text(json.dumps(options["--env"]))
  print("0123456789abcdef")


def execute(state: pathlib.Path, options: dict[str, list[str]], rest: list[str]) -> None:
  name, *argv = rest
  box = state / name
  if not box.is_dir():
    fail(125, f"no container with name {name}")
  if any("kill -9 -1" in argument for argument in argv):  # never to be run outside a container
    if (box / "full").exists():
      fail(1, "cannot fork")
    end_processes(name)
    print("swept")
    return
  work = str(box / "work")
  pairs = [pair.replace("/work", work) for pair in json.loads((box / "env").read_text())]
  environment = {"PATH": os.environ["PATH"], MARK: name} | dict(p.split("=", 1) for p in pairs)
  process = subprocess.Popen(
    [work if argument == "/work" else argument for argument in argv],
    cwd=work,
    env=environment,
    stdin=None if "--interactive" in options else subprocess.DEVNULL,
    start_new_session=True,  # it outlives this client, as in an engine
  )
  code = process.wait()
  sys.exit(code if code >= 0 else 128 - code)


def main() -> None:
  state = pathlib.Path(sys.argv[1])
  with open(state / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\n")
  command, arguments = sys.argv[2], sys.argv[3:]
  options, rest = parse(arguments)
  if command == "run":
    run(state, options, rest)
  elif command == "exec":
    execute(state, options, rest)
  elif command == "ps":
    print("\n".join(path.name for path in state.iterdir() if path.is_dir()))
  elif command == "inspect":
    sys.exit(0 if (state / rest[0]).is_dir() else 1)
  elif command == "rm":
    end_processes(rest[0])
    shutil.rmtree(state / rest[0], ignore_errors=True)


main()
