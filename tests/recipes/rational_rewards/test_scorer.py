import pytest
from absl import flags

from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
from agentjax.config import ConfigError
from agentjax.recipes.rational_rewards import RationalRewardsConfig
from agentjax.recipes.rational_rewards.scorer import CritiqueScorer
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.training import load_experiment
from agentjax.training.experiment import write_experiment
from agentjax.training.flags import define_config_flag
from agentjax.trajectory.record import Status
from tests.rewards.judging import Scripted, episode, run, task

_NAME = "agentjax.recipes.rational_rewards:RationalRewardsConfig"
_REPLY = """## Request analysis
correctness: 1 is not a grade, it stands in the wrong section.

## Detailed judgement
correctness: 4, it is right.
clarity: 2, too long.
"""
_CONFIG = RationalRewardsConfig(aspects=("correctness", "clarity"))


def test_the_mean_grade_of_a_critique_is_the_reward():
  judge = Scripted(lambda messages, key: _REPLY)
  scorer = CritiqueScorer(judge, _CONFIG)
  assert run(scorer(episode("It scatters."), task())).value == pytest.approx((3 - 1) / 3)
  asked = judge.asked[0][0][-1].content
  assert "It scatters." in asked and "Why is the sky blue?" in asked
  assert "correctness: 1 to 4" in asked and "clarity: 1 to 4" in asked


def test_the_same_episode_is_asked_about_in_the_same_words_and_another_with_another_key():
  judge = Scripted(lambda messages, key: _REPLY)
  scorer = CritiqueScorer(judge, _CONFIG)
  for sample in (0, 0, 1):
    run(scorer(episode("It scatters.", sample), task()))
  assert judge.asked[0] == judge.asked[1]
  assert judge.asked[0][1] != judge.asked[2][1]


def test_no_answer_scores_zero_and_nobody_is_asked():
  judge = Scripted(lambda messages, key: _REPLY)
  scorer = CritiqueScorer(judge, _CONFIG)
  for one in (episode(None), episode("It scatters.", status=Status.POLICY_ERROR)):
    assert run(scorer(one, task())).value == 0.0
  assert not judge.asked


def test_a_critique_without_grades_is_invalid_unless_zero_is_asked_for():
  judge = Scripted(lambda messages, key: "a fine answer")
  assert not run(CritiqueScorer(judge, _CONFIG)(episode("It scatters."), task())).valid
  zero = RationalRewardsConfig(aspects=("clarity",), unreadable="zero")
  assert run(CritiqueScorer(judge, zero)(episode("It scatters."), task())).value == 0.0


def test_a_judge_that_stays_away_makes_the_reward_invalid(monkeypatch):
  async def at_once(seconds):
    pass

  monkeypatch.setattr("agentjax.rewards.judges.asyncio.sleep", at_once)
  judge = Scripted(lambda messages, key: JudgeUnavailableError("down"))
  reward = run(CritiqueScorer(judge, _CONFIG)(episode("It scatters."), task()))
  assert not reward.valid and "down" in reward.reason
  assert len(judge.asked) == 3


def _experiment(*changes):
  values = flags.FlagValues()
  argv = ["train", "--config=configs/quickstart.py", *changes]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  return config.value


def test_a_run_chooses_it_by_its_name(tmp_path):
  part = "--config.reward.settings.critique"
  chosen = _experiment(
    "--config.reward.parts=critique",
    f"{part}={_NAME}",
    f"{part}.aspects=clarity",
    f"{part}.judge.base_url=http://localhost:8000/v1",
    f"{part}.judge.model=judge",
  )
  chosen.reward.validate("config.reward")
  config = chosen.reward.settings["critique"]
  assert (config.aspects, config.judge.model) == (("clarity",), "judge")
  saved = tmp_path / "config.json"
  saved.write_text(write_experiment(chosen))
  assert load_experiment(saved).reward == chosen.reward


@pytest.mark.parametrize(
  ("config", "field"),
  [
    (RationalRewardsConfig(), "base_url"),
    (RationalRewardsConfig((), judge=HttpJudgeConfig("http://host/v1", "judge")), "aspects"),
  ],
)
def test_settings_are_checked(config, field):
  with pytest.raises(ConfigError, match=field):
    config.validate("config.reward")
