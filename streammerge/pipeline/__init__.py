"""Putting the layers together: inspect, plan and merge, from a source to a finished folder."""

from streammerge.pipeline.commands import inspect, merge, plan
from streammerge.pipeline.prepare import Observer

__all__ = ["Observer", "inspect", "merge", "plan"]
