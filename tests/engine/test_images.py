"""Images of a request: refused without a vision tower, else part of what may be shared."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import Engine, ImageError, SampleRequest, address_key
from agentjax.models import blocks
from tests.engine.conftest import sizes

PROMPT = [i % 40 for i in range(40)]
CAT, DOG = "a" * 64, "b" * 64


@pytest.fixture
def seeing(monkeypatch, model_config):
  """A model whose stream says that it sees images."""
  stream = blocks.StreamKind(
    spec=lambda config: None,
    open=lambda x, params, config, token_ids: (x, None),
    give=lambda inputs, number, experts: experts,
    close=lambda x: x,
    replace=lambda x, other: other,
    sees_images=True,
  )
  monkeypatch.setitem(blocks.NAMES, "~", "attention that sees")
  monkeypatch.setitem(blocks.KINDS, "~", dataclasses.replace(blocks.KINDS["*"], stream=stream))
  return dataclasses.replace(model_config, pattern="~~")


def test_a_model_without_a_tower_refuses_images_before_anything_is_computed(make_engine):
  engine = make_engine()

  async def main():
    with pytest.raises(ImageError, match=r"2 images .* at token 3.*'M\*E-'.*allowed: images="):
      await engine.open_ids(PROMPT, images=((3, CAT), (9, DOG)))
    with pytest.raises(ImageError, match="no vision tower"):
      await engine.prefill(PROMPT, images=((3, CAT),))
    context = await engine.open_ids(PROMPT)
    with pytest.raises(ImageError, match="no vision tower"):
      await context.extend([1, 2], images=((0, CAT),))
    assert len(context) == len(PROMPT)

  asyncio.run(main())
  assert engine.stats.extended_tokens == 0


def test_blocks_of_two_streams_are_refused(seeing):
  with pytest.raises(ConfigError, match=r"model.pattern='~\*'; allowed: .*the same stream"):
    models.param_specs(dataclasses.replace(seeing, pattern="~*"))


def test_cached_state_is_shared_up_to_the_first_other_image(seeing):
  engine = Engine(seeing, sizes(prefix_reuse="turns"), devices=jax.local_devices()[:1])
  engine.publish(models.init(seeing, jax.random.key(0)), 0)

  async def reused(images) -> int:
    before = engine.stats.reused_tokens
    context = await engine.open_ids(PROMPT, images=images)
    await context.generate(SampleRequest(address_key(0, 1), 2))
    context.close()
    await asyncio.sleep(0.2)
    return engine.stats.reused_tokens - before

  async def main():
    return [
      await reused(images)
      for images in (
        ((20, CAT),),
        ((20, CAT),),
        ((20, DOG),),
        (),
        ((20, CAT), (30, DOG)),
        ((20, CAT), (30, CAT)),
      )
    ]

  # A prompt's last token is never taken from a part of an entry: something must be computed.
  assert asyncio.run(main()) == [0, len(PROMPT) - 1, 20, 20, 30, 30]
  engine.close()
