"""streammerge: from the pieces that distributed training leaves behind to a Hugging Face folder.

import streammerge as sm

print(sm.inspect("run/global_step_100/actor"))
sm.merge("run/global_step_100/actor", "merged", max_ram="16G")
"""

from streammerge.errors import StreammergeError
from streammerge.options import MergeOptions
from streammerge.pipeline import Observer, compare, inspect, merge, plan, test, verify
from streammerge.reports import CompareReport, InspectReport, MergeReport, PlanReport, VerifyReport
from streammerge.version import __version__

__all__ = [
    "CompareReport",
    "InspectReport",
    "MergeOptions",
    "MergeReport",
    "Observer",
    "PlanReport",
    "StreammergeError",
    "VerifyReport",
    "__version__",
    "compare",
    "inspect",
    "merge",
    "plan",
    "test",
    "verify",
]
