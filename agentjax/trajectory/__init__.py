"""What happened in episodes, and how it becomes a batch. Import from the submodules."""
