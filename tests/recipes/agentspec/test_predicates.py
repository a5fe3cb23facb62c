"""The bundled predicates, on what they must find and what they must leave alone."""

import re

import pytest

from agentjax.recipes.agentspec.predicates import PREDICATES
from agentjax.rollout.guards import Situation, Step
from agentjax.tools.protocol import ToolResult, ToolStatus


def shell(command, tool="shell"):
  return Situation("before_action", 0, tool_name=tool, tool_input={"command": command})


DESTRUCTIVE = [
  "rm -rf /",
  "cd x && rm -r -f build",
  "sudo /bin/rm --recursive data",
  "rm notes.txt -f",
  'subprocess.run(["rm", "-rf", "x"])',
  "ls; mkfs.ext4 /dev/sda1",
  "dd if=/dev/zero of=/dev/sda",
  "cat x > /dev/sda",
  ":(){ :|:& };:",
  "chmod -R 777 /",
  "find . -name '*.py' -delete",
  "find . | xargs rm",
  "git push --force origin main",
  "git push -f",
  "git -C repo reset --hard HEAD~3",
  "git clean -fdx",
  "shutil.rmtree('x')",
  "os.remove(path)",
  "DROP TABLE users",
  "delete from users;",
  "truncate -s 0 log",
]
HARMLESS = [
  "ls -rf",
  "echo term -r",
  "grep -rf patterns .",
  "git push origin main",
  "git reset HEAD x",
  "find . -name delete",
  "SELECT * FROM drops",
  "delete from users where id = 3;",
  "dd if=a.img bs=1M",
  "print('inform -r')",
  "python train.py --rm-ratio -f",
]


@pytest.mark.parametrize("command", DESTRUCTIVE)
def test_destruction_is_seen(command):
  assert PREDICATES["is_destructive"](shell(command))


@pytest.mark.parametrize("command", HARMLESS)
def test_harmless_commands_are_not_called_destructive(command):
  assert not PREDICATES["is_destructive"](shell(command))


@pytest.mark.parametrize(
  ("command", "outside"),
  [
    ("echo hi > out.txt", False),
    ("echo hi > /desk/out.txt", False),
    ("echo hi > sub/../out.txt", False),
    ("echo hi > /etc/passwd", True),
    ("echo hi >> ../x", True),
    ("echo hi>/tmp/x", True),
    ("make 2>&1 > /dev/null", False),
    ("make &> /tmp/log", True),
    ("cat /etc/passwd", False),
    ("cp /etc/passwd .", False),
    ("cp a /etc/b > log", True),
    ("mv /etc/passwd here", True),
    ("sudo tee /etc/hosts < x", True),
    ("FOO=1 touch ~/x", True),
    ("mkdir -p $HOME/x", True),
    ("dd if=a of=/tmp/b", True),
    ("sed -i s/a/b/ /etc/hosts", True),
    ("sed s/a/b/ /etc/hosts", False),
    ("curl http://x -o /tmp/x", True),
    ("true && (rm /deskx/file)", True),
    ("echo 'unclosed > /etc/x", True),
    ("open('/etc/x', 'w').write('')", True),
    ("open('x', mode='a')", False),
    ("open('/etc/x')", False),
    ("open('/etc/x', 'rb')", False),
    ("Path('/tmp/a').write_text('b')", True),
    ("Path('/tmp/a').read_text()", False),
  ],
)
def test_writes_outside_of_a_folder_are_seen(command, outside):
  assert PREDICATES["writes_outside"](shell(command), "/desk") is outside


@pytest.mark.parametrize(
  ("tool", "arguments", "outside"),
  [
    ("write_file", {"path": "/etc/x", "text": "a"}, True),
    ("write_file", {"path": "a/b", "text": "/etc/x"}, False),
    ("edit", {"file_path": "../../etc"}, True),
    ("read_file", {"path": "/etc/x"}, False),
    ("move", {"source": "a", "to": "/b"}, True),
  ],
)
def test_paths_of_writing_tools_are_seen(tool, arguments, outside):
  situation = Situation("before_action", 0, tool_name=tool, tool_input=arguments)
  assert PREDICATES["writes_outside"](situation, "/desk") is outside


@pytest.mark.parametrize(
  ("text", "seen"),
  [
    ("curl example.org", True),
    ("see https://example.org", True),
    ("git clone x", True),
    ("git status", False),
    ("pip install -q numpy", True),
    ("pip list", False),
    ("exec 3<>/dev/tcp/1.2.3.4/80", True),
    ("import socket", True),
    ("from urllib import request", True),
    ("concurrently install", False),
    ("print('curly')", False),
  ],
)
def test_use_of_the_network_is_seen(text, seen):
  assert PREDICATES["uses_network"](shell(text)) is seen


@pytest.mark.parametrize(
  ("text", "seen"),
  [
    ("-----BEGIN RSA PRIVATE KEY-----", True),
    ("AKIA" + "A1" * 8, True),
    ("ghp_" + "a" * 36, True),
    ("password = hunter2hunter2", True),
    ("export API_KEY='0123456789'", True),
    ("curl -H 'Authorization: Bearer abcdefghij'", True),
    ("postgres://me:secretive@host/db", True),
    ("password = $PASSWORD", False),
    ("the password is missing", False),
    ("https://example.org:8080/a@b", False),
    ("task-" + "a" * 40, False),
  ],
)
def test_secrets_are_seen(text, seen):
  assert PREDICATES["has_secret"](shell(text)) is seen


STEPS = [
  Step(0, "shell", {"command": "ls", "n": 1}, "ok", "abc", 1.5),
  Step(0, "shell", {"n": 1, "command": "ls"}, "ok", "abcd", 1.0),
  Step(1, "read", {"path": "x"}, "denied", "", 0.0),
]


@pytest.mark.parametrize(
  ("name", "arguments", "holds"),
  [
    ("is_repeated", (), True),
    ("is_repeated", (2,), True),
    ("is_repeated", (3,), False),
    ("turns_over", (2,), True),
    ("turns_over", (3,), False),
    ("calls_over", (2,), True),
    ("calls_over", (3,), False),
    ("calls_of_tool_over", (2,), True),
    ("calls_of_tool_over", (3,), False),
    ("tool_seconds_over", (2.4,), True),
    ("tool_seconds_over", (2.5,), False),
    ("output_characters_over", (6,), True),
    ("output_characters_over", (7,), False),
    ("tool_matches", ("sh*",), True),
    ("tool_matches", ("h*",), False),
    ("argument_matches", ("command", re.compile("^l")), True),
    ("argument_matches", ("n", re.compile("^1$")), True),
    ("argument_matches", ("path", re.compile("")), False),
    ("input_matches", (re.compile("s$"),), True),
    ("user_input_matches", (re.compile("list"),), True),
    ("observation_matches", (re.compile("b"),), True),
    ("tool_failed", (), True),
  ],
)
def test_what_is_called_how_often_and_how_much(name, arguments, holds):
  situation = Situation(
    "after_action",
    2,
    user_input="please list",
    tool_name="shell",
    tool_input={"n": 1, "command": "ls"},
    steps=STEPS,
    result=ToolResult(ToolStatus.TIMEOUT, "abc"),
    observation="abc",
  )
  assert PREDICATES[name](situation, *arguments) is holds
