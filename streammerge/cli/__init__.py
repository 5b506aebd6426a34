"""The command line: options, progress and output. No decision about checkpoints is made here."""
