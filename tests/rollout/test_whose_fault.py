"""No episode chooses to be masked: what its files, time, calls and bytes bring about counts."""

import asyncio
import dataclasses
import json
import sys

import pytest

from agentjax.rewards import Part, RewardGraph
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.loop import collect
from agentjax.sandbox.config import Sandboxes
from agentjax.sandbox.interface import SandboxLimits
from agentjax.sandbox.process import ProcessSandboxConfig
from agentjax.text.chat import MarkedChat
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.tools.python import PythonToolConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.workspace import WorkspaceConfig
from agentjax.trajectory.record import Status
from agentjax.trajectory.store import from_record, to_record
from agentjax.world.workspace import WorkspaceEnvironment
from tests.rollout.conftest import make_player, make_task
from tests.rollout.scripted_engine import CALL, END, TOKENIZER, ScriptedEngine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

LIMITS = SandboxLimits(wall_seconds=3.0, cpu_seconds=3.0, disk_bytes=2**24, file_bytes=2**23)
SANDBOX = ProcessSandboxConfig(limits=LIMITS, concurrency=2)


def call(tool, **arguments):
  return json.dumps({"name": tool, "arguments": arguments})


def turn(*calls, text=""):
  ids = TOKENIZER.encode(text)
  for one in calls:
    ids += [CALL, *TOKENIZER.encode(one)]
  return [*ids, END]


def shell(command):
  return call("shell", command=command)


def python(code):
  return call("python", code=code)


def files(**arguments):
  """A call whose arguments are JSON as it stands."""
  inside = ", ".join(f'"{name}": {value}' for name, value in arguments.items())
  return '{"name": "files", "arguments": {' + inside + "}}"


NEST = "import os\nfor _ in range({}):\n  os.mkdir('d'); os.chdir('d')"
# What the policy does in its first turn; it then looks at what is left, and gives a wrong answer.
ACTIONS = {
  "undecodable process names": shell(
    r"python3 -c 'import ctypes,time; ctypes.CDLL(None).prctl(15, bytes([255, 254]), 0, 0, 0); "
    r"time.sleep(0.3)'"
  ),
  "an undecodable name of an interpreter that stays": python(
    "import ctypes\nctypes.CDLL(None).prctl(15, bytes([255, 41, 40]), 0, 0, 0)"
  ),
  "an undecodable process name of a thread": python(
    "import ctypes, threading, time\ndef run():\n"
    "  ctypes.CDLL(None).prctl(15, bytes([255, 41, 40]), 0, 0, 0); time.sleep(0.3)\n"
    "t = threading.Thread(target=run); t.start(); t.join()"
  ),
  "a directory where a file is expected": shell("rm -f answer.py; mkdir -p answer.py/x"),
  "paths 600 deep": shell(f'python3 -c "{NEST.format(600)}"'),
  "paths 1,200 deep": shell(f'python3 -c "{NEST.format(1200)}"'),
  "a sparse file": shell("for i in 1 2 3; do truncate -s 8388608 h$i; done"),
  "many sparse files": shell("for i in $(seq 60); do truncate -s 8388608 h$i; done"),
  "a relative path of 4,060 characters": shell(
    "python3 -c \"import os\nfor _ in range(20):\n  os.mkdir('d' * 200); os.chdir('d' * 200)\""
  ),
  "a path of 4,060 characters to create": call(
    "files", command="create", path="/".join(["d" * 200] * 20)[:4060], file_text="x"
  ),
  "umask 777": shell("umask 777; echo x > locked; mkdir closed"),
  "a closed work directory": shell("chmod 000 ."),
  "closed folders": shell("mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a"),
  "a full disk": shell("head -c 8000000 /dev/zero > a; head -c 8000000 /dev/zero > b; echo x > c"),
  "undecodable output": shell(r"printf '\377\376\200'; printf '\377' >&2"),
  "a surrogate in an argument": shell("echo \ud800"),
  "names that are no text": shell(r"touch $(printf 'a\377') $(printf 'b\nc')"),
  "a list of names that are no text": call("files", command="list"),
  "links in a circle": shell("ln -s a b; ln -s b a; ln -s . self; ln -s /etc/passwd out"),
  "pipes and sockets": shell(
    "mkfifo pipe; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\""
  ),
  "hard links": shell("echo x > a; for i in $(seq 300); do ln a l$i; done"),
  "many files": shell("for i in $(seq 12000); do : > f$i; done"),
  "odd modes and times": shell(
    "echo x > a; chmod 7777 a; touch -d 1901-01-01 a; touch -d 2900-01-01 b"
  ),
  "a read-only folder": shell("mkdir r; echo x > r/f; chmod 500 r; chmod 400 r/f"),
  "a process that does not end": shell("sleep 100"),
  "a flood of output": shell("yes"),
  "a flood of processes": shell("f() { f | f & }; f"),
  "it ends its own session": python("import os, signal; os.kill(0, signal.SIGKILL)"),
  "no answer within memory": python("x = bytearray(2**32)"),
  "a pattern without end": call(
    "files", command="search", pattern="(a+)+$", regex=True, path="aaaa.txt"
  ),
  "a pattern too deep": call("files", command="search", pattern="(" * 3000, regex=True),
  "huge numbers": call("files", command="view", path="aaaa.txt", view_range=[10**300, -(10**300)]),
  "no number": '{"name": "files", "arguments": {"command": "list", "path": 1e999}}',
  "deep arguments": '{"name": "files", "arguments": {"command": ' + "[" * 3000,
  "no JSON": '{"name": "shell", "arguments": {"command": "\\ud800"}}',
  "a NUL in a path": call("files", command="view", path="a\0b"),
  "arguments 500 deep": files(command="[" * 500 + "]" * 500),
  "objects 60 deep": files(command='{"a":' * 60 + "1" + "}" * 60),
  "a name of 30,000 characters": call("f" * 30_000, command="list"),
  "a name with NUL, a mark and a surrogate": '{"name": "sh\\u0000\\u202e\\udffe", "arguments": {}}',
  "a key of 30,000 odd characters": call(
    "files", **{"command": "list", "\u0301\u200d\0" * 10_000: 1}
  ),
  "a number of 4,200 digits": files(command='"list"', path="9" * 4200),
  "an exponent": files(command='"view"', path='"aaaa.txt"', view_range="[1e400, -1e400]"),
  "names that a normal form makes one": shell(
    "touch $(printf 'e\\314\\201') $(printf '\\303\\251')"
  ),
  "no work directory": shell("rm -rf \"$PWD\"; cd ..; rm -rf *"),
  "a link in the place of a file": shell("rm -f answer.py; ln -s /dev/zero answer.py"),
  "it ends every process": shell("kill -9 -1"),
  "closed streams": shell("exec 0<&- 1>&- 2>&-; echo x"),
  "a child that keeps the streams": shell("(sleep 30 &) ; echo x"),
  "an interpreter that closes all it has": python("import os\nos.closerange(0, 256)"),
  "an interpreter that breaks": python("import ctypes\nctypes.string_at(0)"),
  "an interpreter twice": python("import os\nos.fork()\nprint('x')"),
  "an interpreter that forgets how to write": python(
    "import sys, builtins\nsys.stdout = sys.stderr = sys.__stdout__ = None\n"
    "del builtins.print, builtins.repr"
  ),
  "a text that no codec writes": python("'\\ud800' * 100"),
  "a value that cannot be shown": python(
    "class A:\n  def __repr__(self): raise SystemExit(3)\nA()"
  ),
  "limits of its own": shell("ulimit -n 3; ulimit -f 0; echo x > y; ls"),
  "a sub-folder of a file": call("files", command="create", path="aaaa.txt/x", file_text="x"),
}  # fmt: skip


@dataclasses.dataclass
class World:
  registry: ToolRegistry
  workspaces: object

  def make(self, task):
    del task
    return WorkspaceEnvironment(
      self.registry,
      self.workspaces,
      files=lambda task: {"aaaa.txt": b"a" * 60 + b"!", "answer.py": b"x = 1\n"},
      hand_in=lambda files: "done" if files.get("aaaa.txt") else "nothing",
      max_turns=4,
      tool_timeout=20.0,
    )


def play(scripts, sandbox=SANDBOX, **changes):
  """One episode a script, all at once; a script is a list of turns."""
  tools = ToolsConfig(
    names=("shell", "files", "python"),
    timeout=20.0,
    workspace=WorkspaceConfig(max_bytes=2**23, max_files=1000),
    settings={"python": PythonToolConfig(sandbox="python", stateful=True)},
    **changes,
  )

  async def main():
    sandboxes = Sandboxes({"default": sandbox, "python": SANDBOX})
    registry = build_tools(tools, sandboxes=sandboxes)
    world = World(registry, registry.tools[0].workspaces)
    rewards = RewardGraph({"exact_match": SCORERS["exact_match"]}, Part("exact_match"))
    engine = ScriptedEngine(lambda address, turn: scripts[address[1]][turn], max_length=100_000)
    player = make_player(
      engine, max_total_tokens=100_000, max_tokens_per_turn=50_000, environment_timeout=60.0
    )
    player = dataclasses.replace(player, chat=MarkedChat(TOKENIZER, "json"))
    try:
      return await collect(
        [make_task(i, answer="done") for i in range(len(scripts))],
        step=0,
        samples_per_task=1,
        player=player,
        make_environment=world.make,
        rewards=rewards,
      )
    finally:
      await registry.close()

  return asyncio.run(main())


@pytest.fixture(scope="module")
def played():
  """Every action, then a look around; the sandbox is shared, so that each also is a neighbour."""
  look = turn(shell("ls -la | head -5"), call("files", command="list"), python("1"))
  scripts = [[turn(action), look, turn(text="the end")] for action in ACTIONS.values()]
  return dict(zip(ACTIONS, play(scripts), strict=True))


@pytest.mark.parametrize("name", ACTIONS)
def test_what_an_action_brings_about_counts(played, name):
  episode = played[name]
  assert not episode.status.masked and episode.reward.valid, episode.metadata
  assert all(record.status != "infra_error" for record in episode.tools), episode.tools
  # Its record can be kept: what the policy wrote breaks no journal.
  assert from_record(to_record(episode)).status is episode.status


@pytest.mark.slow
def test_24_sleeping_calls_of_one_turn_count_and_hold_nobody_up():
  sandbox = ProcessSandboxConfig(limits=LIMITS, concurrency=2, queue_seconds=3.0)
  flood = [turn(*[shell("sleep 1")] * 24), turn(text="the end")]
  neighbour = [turn(shell("echo done")), turn(text="the end")]
  slow, quick = play([flood, neighbour], sandbox)
  assert not slow.status.masked and slow.reward.valid
  assert len(slow.tools) == 24
  refused = [r for r in slow.tools if "config.tools.calls_per_turn" in r.output]
  assert len(refused) == 8 and {r.status for r in refused} == {"error"}
  assert quick.status is Status.OK and quick.tools[0].output == "done"


def test_a_queue_that_is_full_of_others_is_no_fault_of_the_one_who_waits():
  sandbox = ProcessSandboxConfig(limits=LIMITS, concurrency=1, queue_seconds=0.5)
  episodes = play([[turn(shell("sleep 2")), turn(text="the end")]] * 3, sandbox)
  masked = [e for e in episodes if e.status is Status.ENV_ERROR]
  assert masked and all(e.metadata["fault"]["cause"] == "queue" for e in masked)


@pytest.mark.parametrize("name", ["paths 600 deep", "many sparse files"])
def test_a_folder_that_cannot_be_handed_in_is_an_error_of_the_policy(played, name):
  episode = played[name]
  assert episode.status is Status.POLICY_ERROR and episode.reward.value == 0.0
  assert episode.metadata["fault"]["owner"] == "policy"
  assert episode.metadata["fault"]["cause"] == "files"
