"""What several tests need: writing checkpoints, crafting hostile ones, and reading results back."""
