"""Tensors that know where their bytes lie, and re-index them without reading any."""
