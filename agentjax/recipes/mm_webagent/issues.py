"""An issue of a page: what is wrong, where, how much it costs, and who can mend it."""

from __future__ import annotations

import dataclasses
from typing import Literal

Aspect = Literal["layout", "style", "aesthetics", "image", "video", "chart"]


@dataclasses.dataclass(frozen=True)
class Issue:
  """One fault that was measured.

  Attributes:
    aspect: the score that it lowers.
    code: what kind of fault, a name that code can compare.
    detail: in words, with figures, for models and people.
    path: of the asset that it is about; "" if it is about the page.
    penalty: of layout and style; every issue of an asset counts 1.
    embedding: whether an asset is as it should be and the page shows it wrongly.
  """

  aspect: Aspect
  code: str
  detail: str
  path: str = ""
  penalty: float = 1.0
  embedding: bool = False

  @property
  def of_page(self) -> bool:
    """Whether the page must change rather than an asset."""
    return self.embedding or not self.path
