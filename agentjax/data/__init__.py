"""Data: tasks from generators and files, and batches of them in a resumable order. No jax."""

from agentjax.data.config import DataConfig, load_tasks
from agentjax.data.errors import DataError
from agentjax.data.pipeline import TaskIterator
from agentjax.data.splits import TaskSplits

__all__ = ["DataConfig", "DataError", "TaskIterator", "TaskSplits", "load_tasks"]
