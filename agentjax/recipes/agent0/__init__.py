"""Agent0 (2511.16043): tasks without answers, labelled by the majority; rewards of their author."""

from agentjax.recipes.agent0.questions import QuestionRewardConfig, question_rewards
from agentjax.recipes.agent0.selfconsistency import MajorityConfig, consistency

__all__ = ["MajorityConfig", "QuestionRewardConfig", "consistency", "question_rewards"]
