"""Bundled worlds: a folder each, chosen by its name. A folder's ``Settings`` are the choice."""
