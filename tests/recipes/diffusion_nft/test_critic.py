import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models.spec import init_params
from agentjax.recipes.diffusion_nft.blocks import patches, unpatch
from agentjax.recipes.diffusion_nft.critic import (
  AGREES,
  DIFFERS,
  LENGTH,
  NOT_CLEAR,
  VOCABULARY,
  agreeing,
  critic_spec,
  judge,
  pair_loss,
  rationale_loss,
  read_rationale,
  reward_of,
  score,
  seen_values,
  write_rationale,
)
from agentjax.recipes.diffusion_nft.drawings import UNCLEAR, random_rows, render
from agentjax.recipes.diffusion_nft.pairs import (
  Pairs,
  TeacherConfig,
  anchored_rationales,
  compare,
  consistent,
)


@pytest.fixture(scope="module")
def params():
  return init_params(critic_spec(1, 16, 2), jax.random.key(0))


def _drawings(count, seed=0):
  rows = random_rows(np.random.default_rng(seed), count)
  return render(np.random.default_rng(seed), rows), rows


def test_patches_are_cut_and_joined():
  images = np.random.default_rng(0).normal(size=(2, 32, 32, 3))
  cut = patches(jnp.asarray(images))
  np.testing.assert_allclose(unpatch(cut), images, rtol=1e-6)
  np.testing.assert_allclose(cut[1, 6].reshape(8, 8, 3), images[1, 8:16, 16:24], rtol=1e-6)


def test_golden_rationale():
  prompts, seen = np.array([[0, 1, 2, 3]]), np.array([[0, 2, 2, UNCLEAR]])
  text = write_rationale(seen, prompts)
  assert text.tolist() == [[0, AGREES, 6, DIFFERS, 12, AGREES, NOT_CLEAR, DIFFERS]]
  assert agreeing(text).tolist() == [[True, False, True, False]]
  assert reward_of(text).tolist() == [((4 + 1 + 4 + 1) / 4 - 1) / 3]
  assert seen_values(text).tolist() == seen.tolist()
  assert read_rationale(text[0]) == (
    "shape: disc, agrees; colour: blue, differs; count: three, agrees; place: unclear, differs"
  )


def test_a_token_that_is_no_value_of_its_aspect_counts_as_unclear():
  text = write_rationale(np.array([[0, 0, 0, 0]]), np.array([[0, 0, 0, 0]]))
  text[0, 0], text[0, 2] = 7, AGREES  # a colour, and a verdict
  assert seen_values(text).tolist() == [[UNCLEAR, UNCLEAR, 0, 0]]


def _likelihoods(params, image, row, begun, tokens):
  """Probability of ``begun`` and one of the tokens, for each of them."""
  texts = np.array([[*begun, token] for token in tokens])
  each = jax.vmap(lambda text: rationale_loss(params, image[None], row[None], text[None]))(texts)
  return np.exp(-np.asarray(each) * texts.shape[1])


def test_no_token_of_a_rationale_sees_those_after_it(params):
  images, rows = _drawings(1)
  text = write_rationale(rows, rows)[0]
  each = _likelihoods(params, images[0], rows[0], text[:-1], range(VOCABULARY))
  (before,) = _likelihoods(params, images[0], rows[0], text[:-2], text[-2:-1])
  assert each.sum() == pytest.approx(before, rel=1e-3)
  assert max(each) > 1.1 * min(each)


def test_the_rationale_that_is_written_is_the_likeliest_token_by_token(params):
  images, rows = _drawings(3)
  said = judge(params, images, rows)
  assert said.rationales.shape == (3, LENGTH)
  assert np.isin(said.rationales[:, 1::2], (AGREES, DIFFERS)).all()
  assert ((said.rewards > 0) & (said.rewards < 1)).all()
  for place in (0, 1, 4, 5):
    allowed = (AGREES, DIFFERS) if place % 2 else range(VOCABULARY)
    begun = said.rationales[0, :place]
    likely = _likelihoods(params, images[0], rows[0], begun, allowed)
    assert said.rationales[0, place] == list(allowed)[int(np.argmax(likely))]


def test_the_scalar_critic_learns_from_pairs_alone(params):
  images, rows = _drawings(8)
  better, worse = images[:4], images[4:]
  assert float(pair_loss(params, better, worse, rows[:4])) == pytest.approx(np.log(2))  # zeros
  gradient = jax.grad(pair_loss)(params, better, worse, rows[:4])
  moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
  gap = score(moved, better, rows[:4]) - score(moved, worse, rows[:4])
  assert float(gap.mean()) > 0
  assert not np.asarray(gradient.word_out).any()


def _pairs(count=400, config=None):
  rng = np.random.default_rng(0)
  prompts = random_rows(rng, count)
  rows = np.where(rng.random((count, 2, 4)) < 0.6, prompts[:, None], (prompts[:, None] + 1) % 3)
  images = np.zeros((count, 2, 1, 1, 3), np.float32)
  return compare(rng, prompts, images, rows, config or TeacherConfig())


def test_pairs_of_equal_quality_are_left_out_and_labels_are_wrong_now_and_then():
  pairs = _pairs(2000, TeacherConfig(certainty=1.0))
  right = (pairs.rows == pairs.prompts[:, None]).sum(axis=2)
  ahead = right[:, 1] - right[:, 0]
  assert len(pairs) < 2000 and (ahead != 0).all()
  np.testing.assert_array_equal(pairs.truly_second, ahead > 0)
  near = abs(ahead) == 1
  wrong = (pairs.second != pairs.truly_second)[near].mean()
  assert wrong == pytest.approx(1 / (1 + np.e), abs=0.05)
  assert (pairs.second == pairs.truly_second)[abs(ahead) == 3].mean() > 0.9


def test_rationales_that_do_not_lead_to_the_label_are_dropped():
  prompt = np.array([[0, 0, 0, 0]])
  good, bad = np.array([[0, 0, 0, 0]]), np.array([[0, 1, 1, 0]])
  texts = np.stack(
    [
      np.stack([write_rationale(a, prompt)[0], write_rationale(b, prompt)[0]])
      for a, b in ((good, bad), (bad, good), (good, good))
    ]
  )
  assert consistent(texts, np.array([False] * 3)).tolist() == [True, False, False]
  assert consistent(texts, np.array([True] * 3)).tolist() == [False, True, False]


def test_a_teacher_that_knows_the_label_is_consistent_more_often():
  shares = []
  for tries in (1, 4):
    config = TeacherConfig(error=0.3, tries=tries)
    pairs = _pairs(config=config)
    texts = anchored_rationales(np.random.default_rng(1), pairs, config)
    shares.append(consistent(texts, pairs.second).mean())
  assert shares[1] > shares[0] + 0.1
  exact = TeacherConfig(error=0.0, tries=1, certainty=50.0)
  pairs = _pairs(config=exact)
  texts = anchored_rationales(np.random.default_rng(1), pairs, exact)
  np.testing.assert_array_equal(seen_values(texts[:, 1]), pairs.rows[:, 1])
  assert consistent(texts, pairs.second).all()


def test_pairs_are_taken_by_index():
  pairs = _pairs(50)
  few = pairs.take(np.array([3, 1]))
  assert isinstance(few, Pairs) and len(few) == 2
  np.testing.assert_array_equal(few.rows[1], pairs.rows[1])
