"""Mazes drawn with ``#`` for walls and ``.`` for floor; places are (row, column)."""

from .maze import cells, neighbours, parse
from .regions import areas, region
from .search import distance, path

__all__ = ["areas", "cells", "distance", "neighbours", "parse", "path", "region"]
