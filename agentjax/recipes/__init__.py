"""Recipes: what only one published method needs, a folder each, and ``presets``, which need none.

The core imports none of them.
"""
