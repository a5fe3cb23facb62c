"""Episodes of two rooms, as a policy would have played them."""

from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Reward, Task

CHAT = MarkedChat(ByteTokenizer())
TASK = Task(0, (Message("user", "room 1"),), "", "rooms")
IN_TWO = "room 2"


def played(turns, answers, reward, *, sample=0, task=TASK, ends=True, chat=CHAT):
  """An episode of a task: the policy's texts or ids, and what was answered to each but the last.

  An answer is a text that a user says, or messages.
  """
  builder = TrajectoryBuilder(step=0, task_id=task.id, sample=sample, source=task.source)
  for span in chat.prompt(task.prompt):
    builder.append(span.owner, span.ids)
  for number, text in enumerate(turns):
    ids = (chat.tokenizer.encode(text) if isinstance(text, str) else text) + list(
      chat.stop_ids[:1]
    ) * ends
    builder.append_sampled(ids, [0.0] * len(ids), [0.0] * len(ids), 0)
    if number < len(answers):
      said = answers[number]
      messages = [Message("user", said)] if isinstance(said, str) else said
      for span in chat.observation(messages, ids):
        builder.append(span.owner, span.ids)
  return builder.build(reward=reward if isinstance(reward, Reward) else Reward(reward))
