"""Families of Hugging Face models: their config.json keys, tensor names and own blocks."""
