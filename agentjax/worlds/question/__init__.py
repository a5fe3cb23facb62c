"""The world "question"; see README.md."""

from agentjax.worlds.question.world import QuestionWorldConfig

Settings = QuestionWorldConfig

__all__ = ["QuestionWorldConfig", "Settings"]
