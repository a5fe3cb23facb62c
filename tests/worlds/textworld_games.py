"""A small game in TextWorld's JSON: two rooms, a box, a shelf, two things of which one is held."""

import json

LOGIC = """
# what lies on things
type s : t { predicates { on(o, s); } inform7 { predicates { on(o, s) :: "{o} on {s}"; } } }

type t { rules { look/t :: at(P, r) & $at(t, r) -> at(P, r); } }

type r {
    rules {
        go/east :: at(P, r) & $east_of(r', r) & $free(r, r') & $free(r', r) -> at(P, r');
        go/west :: at(P, r) & $west_of(r', r) & $free(r, r') & $free(r', r) -> at(P, r');
        look :: at(P, r) -> at(P, r);
    }
    reverse_rules { go/east :: go/west; }
    inform7 {
        commands {
            go/east :: "go east" :: "going east";
            go/west :: "go west" :: "going west";
            look :: "look" :: "looking";
        }
    }
}

type c : t {
    rules {
        open/c :: $at(P, r) & $at(c, r) & closed(c) -> open(c);
        close/c :: $at(P, r) & $at(c, r) & open(c) -> closed(c);
    }
    inform7 {
        commands {
            open/c :: "open {c}" :: "opening {c}";
            close/c :: "close {c}" :: "closing {c}";
        }
    }
}

type I {
    rules {
        take :: $at(P, r) & at(o, r) & free(slot) -> in(o, I) & used(slot);
        drop :: $at(P, r) & in(o, I) & used(slot) -> at(o, r) & free(slot);
        take/c :: $at(P, r) & $at(c, r) & $open(c) & in(o, c) & free(slot) -> in(o, I) & used(slot);
        insert :: $at(P, r) & $at(c, r) & $open(c) & in(o, I) & used(slot) -> in(o, c) & free(slot);
        take/s :: $at(P, r) & $at(s, r) & on(o, s) & free(slot) -> in(o, I) & used(slot);
        put :: $at(P, r) & $at(s, r) & in(o, I) & used(slot) -> on(o, s) & free(slot);
    }
    inform7 {
        commands {
            take :: "take {o}" :: "taking {o}";
            drop :: "drop {o}" :: "dropping {o}";
            take/c :: "take {o} from {c}" :: "removing {o} from {c}";
            insert :: "insert {o} into {c}" :: "inserting {o} into {c}";
            take/s :: "take {o} from {s}" :: "removing {o} from {s}";
            put :: "put {o} on {s}" :: "putting {o} on {s}";
        }
    }
}

type o : t { }
type f : o { }
type P { inform7 { code :: "The player." ; } }
type slot { predicates { free(slot); used(slot); } }
"""

NAMES = {
  "P": None, "I": None, "r_0": "hall", "r_1": "kitchen", "c_0": "tin box", "s_0": "shelf",
  "o_0": "red cap", "f_0": "apple", "slot_0": "", "slot_1": "",
}  # fmt: skip

FACTS = (
  "at P r_0", "at c_0 r_1", "at s_0 r_0", "at f_0 r_0", "in o_0 I", "closed c_0",
  "east_of r_1 r_0", "west_of r_0 r_1", "free r_0 r_1", "free r_1 r_0", "free slot_0",
  "used slot_1",
)  # fmt: skip


def _kind(thing):
  return thing.split("_")[0]


def _facts(texts):
  return [
    {"name": name, "arguments": [{"name": thing, "type": _kind(thing)} for thing in things]}
    for name, *things in (text.split() for text in texts)
  ]


def quest(*events, reward=1, failures=()):
  def of(facts):
    return {"commands": [], "actions": [], "condition": {"preconditions": _facts(facts)}}

  return {
    "reward": reward,
    "win_events": [of([event]) for event in events],
    "fail_events": [of([event]) for event in failures],
  }


def game(**changes):
  """Apple into the box (2 points), cap onto the shelf (1): five commands."""
  values = {
    "version": 1,
    "world": _facts(FACTS),
    "quests": [quest("in f_0 c_0", reward=2), quest("on o_0 s_0", "on o_0 c_0")],
    "infos": [[k, {"id": k, "type": _kind(k), "name": name}] for k, name in NAMES.items()],
    "KB": {"logic": LOGIC},
    "metadata": {"goal": "Put everything where it belongs."},
    "objective": "Welcome.",
  }
  return values | changes


def write(folder, splits=("train", "test"), level="easy", **changes):
  """The game in every split of a level."""
  for split in splits:
    place = folder / level / split
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{split}.json").write_text(json.dumps(game(**changes)))
