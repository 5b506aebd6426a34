"""Checkpoint formats: each module reads metadata only and yields a catalogue of tensors."""
