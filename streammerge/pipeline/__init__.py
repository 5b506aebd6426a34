"""Putting the layers together: one function per command."""

from streammerge.pipeline.commands import inspect, merge, plan
from streammerge.pipeline.compare import compare, test
from streammerge.pipeline.prepare import Observer
from streammerge.pipeline.verify import verify

__all__ = ["Observer", "compare", "inspect", "merge", "plan", "test", "verify"]
