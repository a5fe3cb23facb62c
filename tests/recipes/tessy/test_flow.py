"""TESSY with scripted models: who writes what, where chunks are cut, what is given up."""

import asyncio

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.tessy.flow import (
  Continuation,
  GivenUpError,
  TessyConfig,
  WordClassifier,
  find_spans,
  repeats_itself,
  synthesise,
)
from agentjax.trajectory.record import Message, Task

_TASK = Task(id=3, prompt=(Message("user", "2 + 3?"),), answer="5", source="sums")
_CONFIG = TessyConfig(student_tokens=2, teacher_tokens=4)


class _Script:
  """Writes what a function of the text so far says; a token is a word with the space behind it."""

  def __init__(self, says):
    self._says, self.calls = says, []

  async def extend(self, prompt, text, tokens, key):
    assert prompt == _TASK.prompt
    self.calls.append((text, tokens, key))
    words = self._says(text, key).split(" ")
    kept = " ".join(words[:tokens]) + (" " if len(words) > tokens else "")
    return Continuation(kept, min(tokens, len(words)), ended=len(words) <= tokens)


class _Capitals:
  """Words in capitals take ability, all others are style."""

  def style(self, context, chunk):
    found, at = [], 0
    for word in chunk.split():
      at = chunk.index(word, at)
      found.append((at, not word.isupper()))
      at += len(word)
    return found


_BOTH = {"student": _Capitals(), "teacher": _Capitals()}


def _run(student, teacher, config=_CONFIG, predictors=_BOTH):
  writers = {"student": _Script(student), "teacher": _Script(teacher)}
  result = asyncio.run(synthesise(_TASK, writers, predictors, config, seed=7))
  return result, writers


_PLAN = "hmm so TWO PLUS THREE IS FIVE so done </think> never kept".split()


def _follows(*, capitals):
  """Goes on with the plan; what takes the other model comes out as rubbish."""

  def says(text, key):
    if "</think>" in text:
      return " it is 5."
    rest = _PLAN[len(text.split()) :]
    return " ".join(w if w.isupper() == capitals else ("ugh", "BAD")[w.isupper()] for w in rest)

  return says


_student, _teacher = _follows(capitals=False), _follows(capitals=True)


def test_the_teacher_writes_what_takes_ability_and_the_student_the_rest_and_the_answer():
  result, writers = _run(_student, _teacher)
  assert result.parts == (
    ("student", "hmm so "),
    ("teacher", "TWO PLUS THREE IS FIVE "),
    ("student", "so done </think> it is 5."),
  )
  assert result.attempts == 1 and result.teacher_share == pytest.approx(23 / 55)
  # Chunks of their own sizes, and the answer with its own; every call has a key of its own.
  sizes = {name: {tokens for _, tokens, _ in w.calls} for name, w in writers.items()}
  assert sizes == {"student": {2, 4096}, "teacher": {4}}
  keys = [key for w in writers.values() for _, _, key in w.calls]
  assert len(set(keys)) == len(keys) and all(key[:3] == (7, 3, 0) for key in keys)


def test_models_hand_over_text_and_see_all_of_it():
  result, writers = _run(_student, _teacher)
  for author, writer in writers.items():
    assert all(result.text.startswith(text) for text, _, _ in writer.calls), author


def test_the_trace_becomes_a_demonstration_with_its_lineage():
  result, _ = _run(_student, _teacher)
  task = result.demonstration(_TASK)
  assert task.demonstration == (Message("assistant", result.text),)
  assert "".join(text for _, text in task.metadata["tessy"]["parts"]) == result.text


def _after(text, plan):
  return plan if not text else plan[plan.index(" d") :]


class _InWords:
  """Marks a piece inside of a word, as token classifiers do."""

  def style(self, context, chunk):
    at = chunk.find("xx")
    return [(0, True)] + ([(at, False)] if at >= 0 else [])


def test_a_cut_inside_of_a_word_moves_to_the_next_white_space():
  predictors = {"student": _InWords(), "teacher": _Capitals()}
  config = TessyConfig(student_tokens=5, teacher_tokens=5)
  result, writers = _run(
    lambda text, key: " 5." if "</think>" in text else _after(text, "a bxxc d e </think> g"),
    lambda text, key: " SO IT IS DONE and more" if "SO" not in text else "never",
    config,
    predictors,
  )
  assert result.parts[0] == ("student", "a bxxc")
  assert writers["teacher"].calls[0][0] == "a bxxc"


def test_where_both_would_leave_the_word_to_the_other_the_second_writes_on():
  def student(text, key):
    return " 5." if "</think>" in text else "and </think> so" if text else "ABILITY ALONE HERE"

  result, _ = _run(student, lambda text, key: "style and no ability " + "at all " * 3)
  assert result.parts[:2] == (("teacher", "style and no ability "), ("student", "and </think> 5."))


@pytest.mark.parametrize(
  "student,reason",
  [
    (lambda text, key: "end", "ended its text before '</think>'"),
    (lambda text, key: f"on{len(text)} and{len(text)} on ", "max_tokens=60"),
    (lambda text, key: "again and again ", "repeats itself"),
  ],
)
def test_a_trace_of_no_use_is_given_up_and_begun_anew_at_most_so_often(student, reason):
  config = TessyConfig(
    student_tokens=2, max_tokens=60, check_every=5, repetition_words=4, retries=2
  )
  writers = {"student": _Script(student), "teacher": _Script(_teacher)}
  with pytest.raises(GivenUpError) as caught:
    asyncio.run(synthesise(_TASK, writers, _BOTH, config, seed=7))
  assert len(caught.value.args) == 3 and reason in caught.value.args[2]
  assert {key[2] for _, _, key in writers["student"].calls} == {0, 1, 2}

  def better(text, key):
    return _student(text, key) if key[2] == 1 else student(text, key)

  result, _ = _run(better, _teacher, config)
  assert result.attempts == 2 and reason in result.given_up[0]


def test_repetition_is_of_the_last_words():
  text = "one two three " + "so it goes on " * 3
  assert repeats_itself(text, 4, 3) and not repeats_itself(text, 4, 4)
  assert not repeats_itself(text + "and ends well now", 4, 2)
  assert not repeats_itself("short", 4, 2)


def test_labels_of_a_model_are_mapped_back_to_the_text():
  text = "Okay, so x is 3. Let me see: x + 1 is 4. Okay, done."
  spans = find_spans(text, ["Okay, so", "not there", "Let me see:", "Okay,"])
  assert [text[a:b] for a, b in spans] == ["Okay, so", "Let me see:", "Okay,"]
  assert spans[2][0] > spans[1][1]
  also = find_spans(
    "Also sodium is 11, so I think so. 所以是11。", ["so", "I think so", "11x", "所以"]
  )
  assert also == [(19, 21), (22, 32), (34, 36)]
  assert find_spans("Also sodium", ["so", "So"]) == []


def _texts(seed, count):
  rng = np.random.default_rng(seed)
  fillers = ["okay so", "hmm wait", "let me see", "well then"]
  steps = ["x equals 3", "add 4 and 5", "the sum is 9", "divide by 2"]
  texts, spans = [], []
  for _ in range(count):
    text, own = "", []
    for _ in range(4):
      filler, step = rng.choice(fillers), rng.choice(steps)
      own.append((len(text), len(text) + len(filler)))
      text += f"{filler} {step} "
    texts.append(text)
    spans.append(own)
  return texts, spans


def test_a_trained_classifier_finds_the_boundary_in_texts_it_has_not_seen(tmp_path):
  trained = WordClassifier.train(*_texts(0, 30))
  texts, spans = _texts(1, 10)
  right = total = 0
  for text, own in zip(texts, spans, strict=True):
    for start, style in trained.style("", text):
      right += style == any(a <= start < b for a, b in own)
      total += 1
  assert right / total > 0.95
  assert trained.style("x equals", " 3 okay so") == [(1, False), (3, True), (8, True)]
  # A word that was begun belongs to its whole.
  assert trained.style("x equals 3 ok", "ay so") == [(0, True), (3, True)]
  trained.save(tmp_path / "words.npy")
  again = WordClassifier.load(tmp_path / "words.npy")
  assert again.style("", texts[0]) == trained.style("", texts[0])
  with pytest.raises(ValueError, match="both classes"):
    WordClassifier.train(["a b"], [[]])


def test_a_damaged_file_of_words_is_no_classifier(tmp_path):
  file = tmp_path / "words.npy"
  count = WordClassifier.BUCKETS + 1
  for weights in (np.zeros(3, np.float32), np.array(["x"] * count), np.full(count, np.nan, "f4")):
    np.save(file, weights)
    with pytest.raises(ValueError):
      WordClassifier.load(file)
  with file.open("wb") as stream:
    np.savez(stream, np.zeros(count, np.float32))
  for _ in range(2):
    with pytest.raises(ValueError):
      WordClassifier.load(file)
    file.write_bytes(b"")


def test_impossible_settings_name_the_field():
  with pytest.raises(ConfigError, match="tessy.repetition_times=1"):
    TessyConfig(repetition_times=1).validate()
