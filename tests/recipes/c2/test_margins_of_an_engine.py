"""C2's judge over an engine."""

import asyncio

import numpy as np

from agentjax.recipes.c2.rubrics import C2Config, arrange, measure, synthesise
from tests.adapters.test_engine_judge import ASKED, engine, judge_over, params
from tests.rewards.judging import Scripted

__all__ = ["engine", "params"]


def test_c2_takes_its_margins_from_an_engine(engine):
  judge = judge_over(engine)
  pair = arrange(0, ASKED, "this", "that")
  swapped = arrange(0, ASKED, "that", "this")
  written = [f"<analyze>x</analyze>\n1. Safety: Is it {word}?" for word in ("this", "that", "so")]
  generator = Scripted(lambda messages, key: written[len(generator.asked) - 1])

  async def both():
    return await synthesise(pair, generator, judge, C2Config(rubrics=3)), await measure(
      swapped, None, judge, key=1
    )

  result, margin = asyncio.run(both())
  assert len(set(result.margins)) == 3 and np.isfinite([result.without, margin]).all()
