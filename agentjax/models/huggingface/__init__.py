"""Reading and writing Hugging Face checkpoints: one name map per family, for both directions."""

from agentjax.files import CheckpointError
from agentjax.models.huggingface.checkpoint import (
  COMPANIONS,
  RUNTIME_FIELDS,
  copy_companions,
  family_of,
  is_folder,
  load_pretrained,
  read_config,
  save_pretrained,
  tensor_entries,
)
from agentjax.models.huggingface.families import find_family, model_types, register_family
from agentjax.models.huggingface.mapping import Absent, Family, OneOf, Tensor

__all__ = [
  "COMPANIONS",
  "RUNTIME_FIELDS",
  "Absent",
  "CheckpointError",
  "Family",
  "OneOf",
  "Tensor",
  "copy_companions",
  "family_of",
  "find_family",
  "is_folder",
  "load_pretrained",
  "model_types",
  "read_config",
  "register_family",
  "save_pretrained",
  "tensor_entries",
]
