"""Vocabulary and chat template of a Hugging Face folder: ``tokenizer.kind="huggingface"``."""
