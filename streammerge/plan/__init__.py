"""What will be written, decided before any weight is read: pure data, no I/O."""
