"""Benchmarks of streammerge and the generators of their inputs."""
