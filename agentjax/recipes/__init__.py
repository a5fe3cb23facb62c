"""Recipes: code that only one published method needs, one folder each; ``presets`` need no folder.

The core imports none of them.
"""
