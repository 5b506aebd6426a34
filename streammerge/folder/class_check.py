"""Compare planned names and shapes with the model class of the config, in a child process.

``from_pretrained`` fills a missing weight with random numbers and only warns, so a merge has to
find out by itself. The child builds the class on the meta device (no weights) and asks transformers
what ``save_pretrained`` would write; it costs about 350 MB for some seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError

__all__ = ["CHECK_BYTES", "ClassReport", "check_against_class", "raise_for_report"]

CHECK_BYTES = 400 << 20
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class ClassReport:
    """What the check found.

    Attributes:
        note: why it could not be made, or None.
        missing: names that the class expects and the plan lacks.
        wrong_shapes: name -> (planned, expected).
        extra: planned names that the class does not know.
    """

    note: str | None = None
    missing: tuple[str, ...] = ()
    wrong_shapes: Mapping[str, tuple[list[int], list[int]]] | None = None
    extra: tuple[str, ...] = ()

    def without_missing(self, names: Collection[str]) -> tuple[ClassReport, list[str]]:
        """The report without some of the missing names, and which of these it had."""
        rest = tuple(name for name in self.missing if name not in names)
        return replace(self, missing=rest), [name for name in self.missing if name in names]


def check_against_class(
    config: Path, shapes: Mapping[str, tuple[int, ...]], fields: Mapping[str, int] | None = None
) -> ClassReport:
    """Run the check in a child process. A class that transformers does not know is a note.

    Args:
        config: the config.json.
        shapes: planned name -> shape.
        fields: of the config, which the file lacks.
    """
    planned = {name: list(shape) for name, shape in shapes.items()}
    request = json.dumps({"config": str(config.parent), "shapes": planned, "fields": dict(fields or {})})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=request.encode(),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        answer = json.loads(child.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as fault:
        return ClassReport(note=f"the check could not run ({type(fault).__name__})")
    return ClassReport(
        note=answer.get("note"),
        missing=tuple(answer.get("missing", ())),
        wrong_shapes=answer.get("wrong_shapes", {}),
        extra=tuple(answer.get("extra", ())),
    )


def raise_for_report(report: ClassReport, architecture: str | None) -> None:
    """Refuse when weights are missing or have wrong shapes.

    Raises:
        SourceError: lists them.
    """
    problems = [f"missing: {name}" for name in report.missing]
    problems += [
        f"wrong shape: {name} is {planned}, expected {expected}"
        for name, (planned, expected) in (report.wrong_shapes or {}).items()
    ]
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise SourceError(
            f"the checkpoint does not fit {architecture or 'the config'}:\n  {shown}\n"
            "Is config.json of the same model? --no-check merges all the same."
        )


def _main() -> None:
    request = json.load(sys.stdin)
    try:
        answer = _compare(request["config"], request["shapes"], request["fields"])
    except Exception as fault:  # whatever transformers raises for a config is a note, not a failure
        answer = {"note": f"transformers cannot build the model class: {fault}"[:300]}
    print("\n" + json.dumps(answer))


def _compare(folder: str, shapes: dict[str, list[int]], fields: dict[str, int]) -> dict[str, Any]:
    expected, optional = _expected(folder, fields)
    return {
        "missing": sorted(name for name in expected if name not in shapes and name not in optional),
        "wrong_shapes": {
            name: [shapes[name], expected[name]]
            for name in sorted(expected)
            if name in shapes and shapes[name] != expected[name]
        },
        "extra": sorted(name for name in shapes if name not in expected),
    }


def _expected(folder: str, fields: dict[str, int]) -> tuple[dict[str, list[int]], set[str]]:
    """Name -> shape of what ``save_pretrained`` writes, and the names that tying makes optional."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **fields)
    if not config.architectures:
        raise LookupError("config.json names no architecture")
    model_class = getattr(transformers, config.architectures[0], None)
    if model_class is None:
        raise LookupError(f"it has no {config.architectures[0]}")
    with torch.device("meta"):
        model = model_class(config)
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in state.items() if name not in tied and name not in ignored}
    written = revert_weight_conversion(model, dict(kept))
    shapes = {name: list(tensor.shape) for name, tensor in written.items()}
    shapes.update({name: list(state[name].shape) for name in tied if name in state})
    return shapes, tied


if __name__ == "__main__":
    _main()
