"""The ``adapter_config.json`` that PEFT itself writes, made in a child process.

PEFT imports torch and transformers: about 500 MB, which the merge's own process does not need.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PEFT_BYTES", "peft_config_text"]

PEFT_BYTES = 600 << 20
_TIMEOUT_SECONDS = 300


def peft_config_text(fields: Mapping[str, Any], *, by_peft: bool) -> tuple[str, str]:
    """The file's content, and a note where PEFT did not make it.

    Args:
        fields: of ``peft.LoraConfig``.
        by_peft: whether there is memory for PEFT; without, the fields are written as they are, and
            PEFT takes its defaults for the others.
    """
    plain = json.dumps({"peft_type": "LORA", **fields}, indent=2, sort_keys=True) + "\n"
    if not by_peft:
        return plain, "adapter_config.json was written without PEFT, for which the budget is too small"
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(fields).encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
        return json.loads(child.stdout)["text"], ""
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as fault:
        return plain, f"adapter_config.json was written without PEFT ({type(fault).__name__})"


def _main() -> None:
    from peft import LoraConfig  # type: ignore[import-untyped,import-not-found,unused-ignore]

    config = LoraConfig(**json.load(sys.stdin))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        again = LoraConfig.from_pretrained(folder)
        if again.to_dict() != config.to_dict():  # type: ignore[no-untyped-call]
            raise ValueError("the config does not survive being saved")
        content = json.loads(Path(folder, "adapter_config.json").read_text())
    content["target_modules"] = sorted(content["target_modules"])  # PEFT keeps a set, in an order that varies
    print(json.dumps({"text": json.dumps(content, indent=2, sort_keys=True) + "\n"}))


if __name__ == "__main__":
    _main()
