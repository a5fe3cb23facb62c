import dataclasses
import json

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.reward_harness.library import (
  Demonstration,
  Edit,
  Entry,
  Harness,
  HarnessConfig,
  HarnessState,
  Judged,
  Library,
  Outcome,
  SubAgentVerdict,
  accuracy,
  read_sub_agent,
  split,
)
from agentjax.rewards.judges import question_key
from tests.rewards.judging import run


def demonstrations(count=40):
  """The better answer names a fact; which one, the judge knows from its skills alone."""
  return [
    Demonstration(
      i, {"fact": i % 4}, *(("good", "bad") if i % 2 else ("bad", "good")), "A" if i % 2 else "B"
    )
    for i in range(count)
  ]


def skill(name, text=""):
  return Entry("skill", name, text)


def tool(name, text="json"):
  return Entry("tool", name, text)


class World:
  """A judge that is right on fact k with the skill ``fact_k``, wrong on all with ``harmful``."""

  def __init__(self, proposals):
    self.proposals, self.analyses, self.probes, self.repairs = proposals, [], 0, 0

  async def judge(self, library, d, key):
    names = {entry.name for entry in library.entries}
    if "harmful" in names:
      return Judged("tie")
    if f"fact_{d.content['fact']}" in names:
      return Judged("A" if d.first == "good" else "B")
    return Judged("A" if key % 2 else "B")

  async def propose(self, analysis):
    self.analyses.append(analysis)
    at = len(self.analyses) - 1
    return self.proposals[at] if at < len(self.proposals) else []

  async def probe(self, entry, d, key):
    self.probes += 1
    broken = entry.text == "broken" or (entry.text == "shaky" and key % 2)
    return "hm" if broken else '{"ok": true}'

  async def repair(self, entry, answers, key):
    self.repairs += 1
    assert answers and not any("{" in a for a in answers)
    return dataclasses.replace(entry, text="json" if entry.name == "mendable" else entry.text)

  def harness(self, key=1, **changes):
    train, validation = split(demonstrations(), key=5)
    return Harness(
      train,
      validation,
      judge=self.judge,
      propose=self.propose,
      probe=self.probe,
      repair=self.repair,
      config=HarnessConfig(**changes),
      key=key,
    )


def add(entry):
  return Edit("add", entry)


FACTS = [[add(skill(f"fact_{k}"))] for k in range(4)]


def test_the_library_grows_by_what_holds_on_validation():
  world = World([*FACTS, [add(skill("harmful"))]])
  state = run(world.harness().evolve())
  assert [e.name for e in state.best.entries] == [f"fact_{k}" for k in range(4)]
  assert state.best_accuracy == 1.0 and state.library == state.best
  rolled = [h for h in state.history if h["phase"] == "skills"][-1]
  assert rolled["accuracy"] == 0.0 and not rolled["kept"]
  assert state.history[0]["phase"] == "empty" and state.history[0]["accuracy"] < 0.9


def test_training_shows_both_orders_of_every_demonstration():
  world = World([])
  run(world.harness(iterations=1).evolve())
  outcomes = world.analyses[0].outcomes
  assert len(outcomes) == 2 * 24
  first, second = outcomes[0].demonstration, outcomes[1].demonstration
  assert (first.first, first.second) == (second.second, second.first)
  assert {first.label, second.label} == {"A", "B"}


@pytest.mark.parametrize(("loss", "kept"), [(1, True), (2, False)])
def test_a_small_loss_is_tolerated_and_the_best_is_kept_apart(loss, kept):
  """16 validation demonstrations: one wrong costs .0625, two .125; the tolerance is .075."""
  world = World([[add(skill("clumsy"))]])
  harness = world.harness(iterations=1)
  validation = [d.id for d in harness._validation]

  async def judge(library, d, key):
    spoilt = library.entries and d.id in validation[:loss]
    return Judged("tie" if spoilt else d.label)

  harness._judge = judge
  state = run(harness.evolve())
  assert len(validation) == 16
  assert bool(state.library.entries) == kept
  assert state.best == Library() and state.best_accuracy == 1.0
  assert state.accuracy == (1 - 1 / 16 if kept else 1.0)


def test_a_new_tool_must_answer_in_json_and_may_be_repaired():
  world = World([[add(tool("fine")), add(tool("mendable", "broken")), add(tool("lost", "broken"))]])
  state = run(world.harness(iterations=1).evolve())
  assert [(e.name, e.text) for e in state.library.of("tool")] == [
    ("fine", "json"),
    ("mendable", "json"),
  ]
  assert state.history[-1]["refused"] == ["lost"]
  assert world.repairs == 1 + 3 and world.probes == 20 * (1 + 2 + 4)


def test_eighty_per_cent_of_valid_answers_are_enough():
  world = World([[add(tool("shaky", "shaky"))]])
  state = run(world.harness(iterations=1, repairs=0).evolve())
  assert state.library.of("tool") == ()
  state = run(World(world.proposals).harness(iterations=1, repairs=0, valid_share=0.2).evolve())
  assert len(state.library.of("tool")) == 1


def test_the_analyser_is_asked_for_tools_while_there_are_few():
  world = World([[add(tool(f"t{i}")) for i in range(3)], []])
  run(world.harness(iterations=2).evolve())
  assert [a.wants_tool for a in world.analyses] == [True, False]


def test_ablation_removes_what_adds_nothing():
  idle = [add(skill("idle")), add(skill("fact_0")), add(skill("fact_1"))]
  world = World([idle, []])
  state = run(world.harness(iterations=2, ablate_every=2).evolve())
  assert [e.name for e in state.library.entries] == ["fact_0", "fact_1"]
  assert state.best == state.library  # which is what is written
  removed = [h["entry"] for h in state.history if h["phase"] == "ablation" and h["kept"]]
  assert removed == ["idle"]


def test_one_key_gives_one_run_and_a_cut_run_goes_on_to_the_same_end():
  proposals = [*FACTS[:2], [add(tool("t"))], *FACTS[2:]]
  saved = []
  whole = run(World(proposals).harness(key=3).evolve(save=lambda s: saved.append(s.to_json())))
  assert run(World(proposals).harness(key=3).evolve()) == whole
  assert len(saved) == 6
  for at, text in enumerate(saved):
    state = HarnessState.from_json(text)
    assert state.iteration == at
    rest = run(World(proposals[at:]).harness(key=3).evolve(state))
    assert json.loads(rest.to_json()) == json.loads(whole.to_json())
  with pytest.raises(ValueError, match="format"):
    HarnessState.from_json('{"format": 9}')


def test_edits():
  library = Edit("add", skill("a", "1")).apply(Edit("add", skill("b")).apply(Library()))
  assert [e.name for e in library.entries] == ["b", "a"]
  assert Edit("update", skill("b", "2")).apply(library).entries[0].text == "2"
  assert Edit("delete", skill("b")).apply(library).entries == (skill("a", "1"),)
  assert Edit("delete", tool("b")).apply(library) == library


def test_a_group_is_right_iff_all_its_pairs_are():
  pairs = [Demonstration(i, {}, "x", "y", "A", group=7) for i in range(3)]
  alone = Demonstration(9, {}, "x", "y", "A")
  right = [Outcome(d, "A") for d in (*pairs, alone)]
  assert accuracy(right) == 1.0
  assert accuracy([Outcome(pairs[0], "tie"), *right[1:]]) == 0.5
  train, validation = split([*pairs, *demonstrations(10)], key=0)
  assert len({d.group for d in train} & {d.group for d in validation} - {None}) == 0
  with pytest.raises(ValueError, match="one side empty"):
    split(pairs, key=0)
  with pytest.raises(ValueError, match="at least one"):
    accuracy([])


def test_sub_agents_that_cannot_be_read_see_a_tie():
  grades = {f"score_{x}_{w}": 3 for x in "AB" for w in ("instruction", "quality")}
  body = json.dumps({"preference": "B", **grades, "score_B_quality": 4})
  verdict = read_sub_agent(f'<think>{{"preference": "A"}}</think><answer>{body}</answer>')
  assert verdict == SubAgentVerdict("B", (3, 3), (3, 4))
  for broken in ("", "<answer>B</answer>", body.replace("4", "5"), body.replace('"B"', '"C"')):
    assert read_sub_agent(broken) == SubAgentVerdict("tie", (2, 2), (2, 2))


def test_settings_are_checked():
  for changes in ({"iterations": 0}, {"tolerance": 2.0}, {"repairs": -1}):
    with pytest.raises(ConfigError, match=next(iter(changes))):
      HarnessConfig(**changes).validate()
  assert question_key(1) != question_key(2)
