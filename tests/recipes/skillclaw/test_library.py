"""A library on disk: versions, withdrawals, counts, damage, and death at any write."""

import json
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.recipes.skillclaw import library as module
from agentjax.recipes.skillclaw.library import MOST_HISTORY, Library, add, with_skill, without
from agentjax.recipes.skillclaw.skill import skill_id
from tests.recipes.skillclaw.nights import publish, skill


def _files(path):
  return {
    str(p.relative_to(path)): p.read_bytes()
    for p in sorted(path.rglob("*"))
    if p.is_file() and p.name != ".lock"
  }


def test_a_skill_has_versions_and_a_history(tmp_path):
  shelf = Library(tmp_path)
  with shelf.writing():
    shelf.publish(skill("One."), source="n0/edit/0", evidence={"reason": "seen"})
    shelf.publish(skill("Two."), source="n1/edit/0", evidence={})
    again = shelf.publish(skill("Three."), source="n1/edit/0", evidence={})
    assert again.version == 2  # a source changes a skill once
    shelf.withdraw("good", source="n2/withdraw/0", evidence={"with": 0.1, "without": 0.2})
    assert shelf.entries() == () and not (tmp_path / "skills/good/SKILL.md").exists()
    shelf.publish(skill("Four."), source="n3/edit/0", evidence={})
  read = Library(tmp_path)
  assert [(e.skill.body, e.version) for e in read.entries()] == [("Four.", 3)]
  assert read.skill("good", 1).body == "One."
  assert (tmp_path / "skills/good/SKILL.md").read_text() == skill("Four.").text
  history = tmp_path / "skills/good/history"
  assert "seen" in (history / "v1_evidence.md").read_text()
  assert '"without": 0.2' in (history / "v2_withdrawn.md").read_text()
  assert read.made_by("n2/withdraw/0")[1].action == "withdraw"
  values = json.loads((tmp_path / "manifest.json").read_text())["skills"]["good"]
  assert values["id"] == skill_id("good") and len(values["history"]) == 4
  with pytest.raises(ConfigError, match="no version 9 of 'good'; allowed: good"):
    read.skill("good", 9)


def test_a_history_is_bounded_and_versions_go_on(tmp_path):
  shelf = Library(tmp_path)
  with shelf.writing():
    for i in range(MOST_HISTORY + 3):
      shelf.publish(skill(f"Number {i}."), source=str(i), evidence={})
  (entry,) = Library(tmp_path).entries()
  assert entry.version == MOST_HISTORY + 3
  assert len(shelf.records["good"].history) == MOST_HISTORY


def test_episodes_are_counted_once_and_for_the_present_version(tmp_path):
  shelf = publish(tmp_path, skill())
  with shelf.writing():
    for _ in range(2):
      shelf.count("day_0", [(["good"], True), (["good", "good"], False), (["other"], True)])
    (entry,) = shelf.entries()
    assert (entry.shown, entry.positive, entry.effectiveness) == (2, 1, 0.5)
    shelf.publish(skill("Better."), source="x", evidence={})
  assert Library(shelf.path).entries()[0].shown == 0


def test_what_must_not_be_stored_is_not(tmp_path):
  shelf = Library(tmp_path)
  with shelf.writing():
    with pytest.raises(ValueError, match="an address"):
      shelf.publish(skill("See www.x.example"), source="x", evidence={})
    with pytest.raises(ValueError, match="the name"):
      shelf.publish(skill(name="../up"), source="x", evidence={})
  assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]
  with pytest.raises(RuntimeError, match=r"within Library\.writing"):
    shelf.publish(skill(), source="x", evidence={})


def test_a_copy_is_mended_and_a_changed_version_is_told(tmp_path):
  shelf = publish(tmp_path, skill())
  copy = shelf.path / "skills/good/SKILL.md"
  copy.write_text(skill("Something else.").text)
  assert Library(shelf.path).entries()[0].skill == skill()  # nobody reads the copy
  with Library(shelf.path).writing():
    assert copy.read_text() == skill().text
  version = shelf.path / "skills/good/history/v1.md"
  version.write_text(skill("Something else.").text)
  with pytest.raises(DataError, match="was changed after it was published"):
    Library(shelf.path).entries()
  for text in ("{", '{"format": 9}', '{"format": 1, "skills": {"../x": {"history": [1]}}}'):
    (shelf.path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="is no manifest"):
      Library(shelf.path)


def test_one_process_writes_and_other_folders_are_refused(tmp_path):
  with Library(tmp_path / "a").writing():
    with pytest.raises(ConfigError, match="in use by another process"):
      with Library(tmp_path / "a").writing():
        pass
  (tmp_path / "b/skills/x").mkdir(parents=True)
  (tmp_path / "b/skills/x/SKILL.md").write_text(skill().text)
  with pytest.raises(ConfigError, match="no manifest.json"):
    Library(tmp_path / "b")


def test_by_hand_a_skill_is_published_once_a_text(tmp_path):
  shelf = Library(tmp_path)
  with shelf.writing():
    for body in ("One.", "One.", "Two.", "One."):
      add(shelf, [skill(body)])
  assert shelf.entries()[0].version == 3


def test_entries_change_without_the_folder():
  entries = with_skill(with_skill((), skill(name="b")), skill(name="a"))
  assert [e.name for e in entries] == ["a", "b"]
  assert with_skill(entries, skill("Other.", name="a"))[0].skill.body == "Other."
  assert [e.name for e in without(entries, "a")] == ["b"]


class _Death(Exception):
  """The process ends."""


@pytest.mark.parametrize("after", [False, True])
def test_death_at_any_write_leaves_the_old_or_the_new_library(tmp_path, monkeypatch, after):
  write = module.write_atomically

  def change(path, dies_at):
    """Publishes, improves and withdraws; dies at one of its writes."""
    left = [dies_at]

    def dying(target, data):
      left[0] -= 1
      if left[0] == 0 and not after:
        raise _Death
      write(target, data)
      if left[0] == 0:
        raise _Death

    monkeypatch.setattr(module, "write_atomically", dying)
    try:
      shelf = Library(path)
      with shelf.writing():
        shelf.publish(skill("One."), source="a", evidence={})
        shelf.count("day", [(["good"], True)])
        shelf.publish(skill("Two."), source="b", evidence={})
        shelf.publish(skill("Other.", "other"), source="c", evidence={})
        shelf.withdraw("good", source="d", evidence={})
    except _Death:
      return True
    finally:
      monkeypatch.setattr(module, "write_atomically", write)
    return False

  assert not change(tmp_path / "whole", 0)
  wanted, died = _files(tmp_path / "whole"), 0
  while change(tmp_path / f"cut_{died}", died + 1):
    path = tmp_path / f"cut_{died}"
    for entry in Library(path).entries():  # readers find a whole library at any instant
      assert entry.skill.body in ("One.", "Two.", "Other.")
    assert not change(path, 0)
    assert _files(path) == wanted
    died += 1
  assert died >= 14


def test_paths_of_the_manifest_stay_in_the_folder(tmp_path):
  shelf = publish(tmp_path, skill())
  assert pathlib.Path(shelf.path / "skills/good/history/v1.md").is_file()
  with pytest.raises(ConfigError, match="has no version"):
    shelf.skill("../../etc")
