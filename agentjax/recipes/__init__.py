"""Recipes: what only one published method needs, a folder each. The core imports none of them."""
