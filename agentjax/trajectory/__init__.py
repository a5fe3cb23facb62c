"""The record of episodes, and batches made from it. Import from the submodules."""
