"""Carry out a plan: fill tiles of the output files from fragments, within a RAM budget."""
