"""Notes that are searched, a list that forgets, and a wiki that no path leaves."""

import datetime
import json
import os
import subprocess

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.semaclaw import wiki as wiki_module
from agentjax.recipes.semaclaw.memory import MEMORIES, Memory, MemoryConfig, MemoryTool
from agentjax.recipes.semaclaw.permissions import AccessConfig, AccessRules, SeatAccess
from agentjax.recipes.semaclaw.wiki import Wiki, WikiConfig, WikiError, WikiTool
from agentjax.rollout.guards import PermissionBridge, PermissionConfig
from agentjax.tools.hooks import intercepted_by
from agentjax.tools.protocol import ToolContext
from agentjax.tools.registry import ToolRegistry
from agentjax.training import Experiment
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.flags import set_field
from agentjax.trajectory.record import ToolCall
from tests.rewards.judging import run

CONTEXT = ToolContext("episode", 0, 10.0)


class Days:
  def __init__(self):
    self.day = datetime.date(2026, 1, 1)

  def __call__(self):
    return self.day


def memory(tmp_path, **settings):
  config, days = MemoryConfig(folder=str(tmp_path / "memory"), **settings), Days()
  config.validate()
  return Memory(config, days), days


def kept(tmp_path):
  return {m["text"]: m["hits"] for m in json.loads((tmp_path / "memory" / MEMORIES).read_text())}


def test_what_was_saved_is_found_by_its_words_and_its_day(tmp_path):
  made, days = memory(tmp_path, chunk_words=6, overlap_words=2, shown=1)
  made.save("Ann likes green\ntea")
  days.day = datetime.date(2026, 1, 2)
  made.save("Bob likes coffee, and cats")
  assert made.search("what does ANN drink?") == ["2026-01-01: Ann likes green tea"]
  (found,) = made.search("coffee")
  assert found.startswith("2026-01-02: Bob likes coffee")
  assert made.search("zebra") == [] and made.search("?!") == []
  assert made.search('" OR text:* NEAR(') == []  # words are words, no query language
  assert (tmp_path / "memory" / "2026-01-01.md").read_text() == (
    "# 2026-01-01\n\n- Ann likes green tea\n"
  )


@pytest.mark.parametrize(
  ("query", "found"),
  [
    ("绿茶", ["用户喜欢绿茶，不喜欢咖啡。"]),
    ("她喜欢什么？", ["用户喜欢绿茶，不喜欢咖啡。"]),
    ("緑茶", ["ユーザーは緑茶が好き"]),
    ("ユーザー", ["ユーザーは緑茶が好き"]),
    ("사용자", ["사용자는 녹차를 좋아한다"]),
    ("猫", ["猫叫Tom"]),
    ("tom", ["猫叫Tom"]),
    ("茶绿", []),
    ("GREEN tea", ["Ann likes green tea"]),
    ("gree", []),
  ],
)
def test_what_is_written_without_blanks_is_found_too(tmp_path, query, found):
  made, days = memory(tmp_path)
  for text in (
    "用户喜欢绿茶，不喜欢咖啡。",
    "ユーザーは緑茶が好き",
    "사용자는 녹차를 좋아한다",
    "猫叫Tom",
    "Ann likes green tea",
  ):
    made.save(text)
    days.day += datetime.timedelta(days=1)
  assert [text.partition(": ")[2] for text in made.search(query)] == found
  assert all(kept(tmp_path)[text] == 2 for text in found)


def test_the_list_forgets_what_is_old_and_unused_and_notes_do_not(tmp_path):
  made, days = memory(tmp_path, most=2)
  made.save("used often")
  made.save("used never")
  made.search("often")
  made.search("often")
  days.day += datetime.timedelta(days=3)
  made.save("new one")
  assert kept(tmp_path) == {"used often": 3, "new one": 1}
  assert "used never" in made.search("never")[0]
  made.save("new one")
  assert kept(tmp_path)["new one"] == 2
  for text in ("", " \n", "x" * 2001):
    with pytest.raises(ValueError, match="allowed: 1 to 2000"):
      made.save(text)


@pytest.mark.parametrize(
  "text",
  ["", "null", "{}", "7", "[" * 100_000, "[7]", "[{}]", '[{"text": 1, "used": "x", "hits": 1}]',
   '[{"text": "a", "used": "x", "hits": 1}]', '[{"text": "a", "used": "2026-01-01", "hits": "1"}]'],
)  # fmt: skip
def test_a_damaged_list_of_memories_is_nobodys_fault_and_stays_as_it_is(tmp_path, text):
  made, _ = memory(tmp_path)
  made.save("Ann likes tea")
  note, listed = (tmp_path / "memory" / name for name in ("2026-01-01.md", MEMORIES))
  before = note.read_bytes()
  listed.write_text(text)
  registry = ToolRegistry([MemoryTool(made)], retries=0)
  for action in ("save", "search"):
    call = ToolCall("memory", {"action": action, "text": "tea"})
    result = run(registry.call(call, CONTEXT))
    assert result.status == "infra_error" and "memories.json is no list" in result.output
  assert listed.read_text() == text and note.read_bytes() == before
  listed.unlink()
  assert made.search("tea") == ["2026-01-01: Ann likes tea"]


def test_a_note_of_any_bytes_keeps_them_and_a_memory_of_any_text_is_saved(tmp_path):
  made, _ = memory(tmp_path)
  note = tmp_path / "memory" / "2026-01-01.md"
  note.parent.mkdir()
  note.write_bytes(b"# by hand\n\n- caf\xe9 noir\n")
  made.save("half \ud83d of a pair")
  assert note.read_bytes() == b"# by hand\n\n- caf\xe9 noir\n\n- half ? of a pair\n"
  assert "half ? of a pair" in made.search("pair")[0] and made.search("\ud83d") == []


def wiki(tmp_path, **settings):
  return Wiki(WikiConfig(folder=str(tmp_path / "wiki"), **settings))


def test_every_saved_page_is_a_commit(tmp_path):
  made = wiki(tmp_path)
  assert made.tree() == "the wiki is empty" and made.history("a.md") == []
  first = made.save("people/ann.md", "# Ann")
  assert made.save("people/ann.md", "# Ann") == first  # nothing changed
  second = made.save("people/ann.md", "# Ann\nlikes tea")
  made.mkdir("plans")
  assert made.tree() == "people/\nplans/\npeople/ann.md"
  assert made.read("people/ann.md") == "# Ann\nlikes tea"
  history = made.history("people/ann.md")
  assert [line.split()[0] for line in history] == [second, first]


@pytest.mark.parametrize(
  "path",
  [
    "../out.md",
    "a/../../out.md",
    "/etc/out.md",
    ".git/hooks/pre-commit.md",
    "a/.git/x.md",
    ".hidden.md",
    "-rf.md",
    "a//b.md",
    "a\\..\\b.md",
    "a\nb.md",
    "a\0b.md",
    "",
    "a.txt",
    "/".join("abcdefghij") + ".md",
    "n" * 80 + ".md",
  ],
)
def test_a_hostile_path_is_refused_and_nothing_is_written(tmp_path, path):
  made = wiki(tmp_path)
  made.save("good.md", "good")
  before = sorted(p for p in tmp_path.rglob("*") if ".git" not in p.parts)
  for call in (lambda: made.save(path, "bad"), lambda: made.read(path)):
    with pytest.raises(WikiError):
      call()
  assert sorted(p for p in tmp_path.rglob("*") if ".git" not in p.parts) == before


def test_no_link_is_followed_and_no_hook_runs(tmp_path, monkeypatch):
  made = wiki(tmp_path)
  made.save("good.md", "good")
  root, outside = tmp_path / "wiki", tmp_path / "outside"
  outside.mkdir()
  (root / "door").symlink_to(outside)
  (root / "page.md").symlink_to(outside / "page.md")
  for path in ("door/x.md", "page.md"):
    with pytest.raises(WikiError, match="leads through a link"):
      made.save(path, "bad")
  hook = root / ".git" / "hooks" / "pre-commit"
  hook.parent.mkdir(exist_ok=True)
  hook.write_text(f"#!/bin/sh\ntouch {outside}/ran\n")
  hook.chmod(0o755)
  monkeypatch.setenv("GIT_DIR", str(outside))  # of whoever started us
  made.save("good.md", "better")
  assert list(outside.iterdir()) == []


def test_a_process_that_died_between_page_and_commit_loses_nothing(tmp_path, monkeypatch):
  made = wiki(tmp_path)
  made.save("a.md", "one")

  def die(self, root, subject):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(wiki_module.Wiki, "_repair", lambda self, root: None)
    patched.setattr(wiki_module.Wiki, "_commit", die)
    with pytest.raises(KeyboardInterrupt):
      made.save("a.md", "two")
  (tmp_path / "wiki" / ".git" / "index.lock").touch()  # git died too
  made.save("b.md", "three")
  subjects = [line.partition(" ")[2] for line in made.history("a.md")]
  assert subjects == ["recovered", "a.md: saved"] and made.read("a.md") == "two"
  status = subprocess.run(
    ["git", "-C", tmp_path / "wiki", "status", "--porcelain"],
    capture_output=True,
    check=True,
    env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
  )
  assert status.stdout == b""


@pytest.mark.parametrize(
  "left",
  ["index.lock", "HEAD.lock", "config.lock", "refs/heads/main.lock", "logs/refs/heads/main.lock"],
)
def test_a_lock_of_a_git_that_died_stops_no_later_page(tmp_path, left):
  made = wiki(tmp_path)
  made.save("a.md", "one")
  lock = tmp_path / "wiki" / ".git" / left
  lock.touch()
  made.save("a.md", "two")
  assert len(made.history("a.md")) == 2 and not lock.exists()


@pytest.mark.parametrize("made_until", ["nothing", "HEAD.lock", "objects", "HEAD", "config"])
def test_a_repository_that_is_half_made_is_completed(tmp_path, made_until):
  made = wiki(tmp_path)
  root = tmp_path / "wiki"
  made.save("a.md", "one")
  git = root / ".git"
  whole = tmp_path / "whole"
  git.rename(whole)
  git.mkdir()
  if made_until != "nothing":
    path = whole / made_until
    if made_until == "objects":
      (git / "objects").mkdir()
    elif path.exists():
      (git / made_until).write_bytes(path.read_bytes())
    else:
      (git / made_until).touch()
  made.save("b.md", "two")
  assert [len(made.history(name)) for name in ("a.md", "b.md")] == [1, 1]
  listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, check=True)
  assert listed.stdout.decode().split() == ["a.md", "b.md"]  # and no lock of the folder


@pytest.mark.parametrize("left", ["no repository", "half of one", "no commit"])
def test_a_wiki_without_a_commit_has_pages_and_no_history(tmp_path, left):
  made, root = wiki(tmp_path), tmp_path / "wiki"
  root.mkdir()
  if left == "half of one":
    (root / ".git").mkdir()
  elif left == "no commit":
    subprocess.run(["git", "-C", root, "init", "-q"], check=True)
  (root / "a.md").write_text("by hand")
  assert made.history("a.md") == made.history("none.md") == []
  assert made.tree() == "a.md" and made.read("a.md") == "by hand"
  made.mkdir("plans")
  with pytest.raises(WikiError, match="no page"):
    made.read("plans/b.md")
  made.save("a.md", "better")
  assert [line.partition(" ")[2] for line in made.history("a.md")] == ["a.md: saved", "recovered"]


def test_sizes_have_bounds_and_folders_are_no_pages(tmp_path):
  made = wiki(tmp_path, most_characters=5, most_pages=1)
  with pytest.raises(WikiError, match="6 characters; allowed: 5"):
    made.save("a.md", "x" * 6)
  made.save("a.md", "one")
  for path, message in (("b.md", "no room"), ("a.md/b.md", "no room|lies in a page")):
    with pytest.raises(WikiError, match=message):
      made.save(path, "two")
  with pytest.raises(WikiError, match="is a page"):
    made.mkdir("a.md/b")


def test_an_argument_that_a_tool_does_not_know_cannot_fit_a_rule_in_the_place_of_others(tmp_path):
  made, (notes, _) = wiki(tmp_path), memory(tmp_path)
  registry = ToolRegistry([WikiTool(made), MemoryTool(notes)])
  config = AccessConfig(rules=('grant * * "action": "(read|search)"',), otherwise="refuse")
  seat = SeatAccess(AccessRules(config, PermissionBridge(PermissionConfig())), "ann", 0)

  async def save(name, **arguments):
    with intercepted_by(seat):
      return await registry.call(ToolCall(name, {"action": "save", **arguments}), CONTEXT)

  page = {"path": "a.md", "text": "x"}
  assert run(save("wiki", **page)).status == "denied"
  assert run(save("wiki", **page, more={"action": "read"})).status == "error"
  assert run(save("memory", text="x", more={"action": "search"})).status == "error"
  assert made.tree() == "the wiki is empty" and notes.search("x") == []


def test_a_run_takes_both_tools_by_flags(tmp_path):
  experiment = Experiment()
  names = ("agentjax.recipes.semaclaw.memory:MemoryConfig", "wiki")
  set_field(experiment, ["tools", "names"], "memory,wiki")
  for name, kind in (("memory", names[0]), ("wiki", "agentjax.recipes.semaclaw.wiki:WikiConfig")):
    set_field(experiment, ["tools", "settings", name], kind)
  set_field(experiment, ["data", "train_size"], "4")
  set_field(experiment, ["supervised", "steps"], "1")
  with pytest.raises(ConfigError, match="a folder for"):
    experiment.validate()
  for name in ("memory", "wiki"):
    set_field(experiment, ["tools", "settings", name, "folder"], str(tmp_path / name))
  experiment.validate()
  scoring = build_scoring(experiment, Extensions())
  tools = {tool.name: tool for tool in scoring.world.tools}
  saved = {"action": "save", "text": "Ann likes tea"}
  assert run(tools["memory"](saved, CONTEXT)).output == "saved"
  found = run(tools["memory"]({"action": "search", "text": "tea"}, CONTEXT)).output
  assert found.endswith("Ann likes tea")
  bad = run(tools["wiki"]({"action": "save", "path": "../x.md", "text": "y"}, CONTEXT))
  assert bad.status == "error" and bad.output.startswith("error: path")
  assert run(WikiTool(wiki(tmp_path))({"action": "read"}, CONTEXT)).output == (
    "error: read needs a path"
  )
