"""streammerge: from the pieces that distributed training leaves behind to a Hugging Face folder.

import streammerge as sm

print(sm.inspect("run/global_step_100/actor"))
sm.merge("run/global_step_100/actor", "merged", max_ram="16G")
"""

from streammerge.errors import StreammergeError
from streammerge.options import MergeOptions
from streammerge.pipeline import Observer, inspect, merge, plan
from streammerge.reports import InspectReport, MergeReport, PlanReport
from streammerge.version import __version__

__all__ = [
    "InspectReport",
    "MergeOptions",
    "MergeReport",
    "Observer",
    "PlanReport",
    "StreammergeError",
    "__version__",
    "inspect",
    "merge",
    "plan",
]
