"""Small operations on text."""

from .distance import edit_distance, longest_common
from .layout import justify, wrap
from .numerals import from_roman, to_roman
from .words import acronym, slug, title

__all__ = [
  "acronym",
  "edit_distance",
  "from_roman",
  "justify",
  "longest_common",
  "slug",
  "title",
  "to_roman",
  "wrap",
]
