"""Compare the logits of two model folders on a few tokens, in a child process that loads one after the other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streammerge.errors import UnsupportedError

__all__ = ["LOADING_BYTES", "compare_logits"]

# torch and transformers themselves, besides the weights.
LOADING_BYTES = 700 << 20


def compare_logits(first: Path, second: Path, prompt: str) -> Mapping[str, Any]:
    """Load both folders with transformers and run the same tokens through them.

    Args:
        prompt: token ids separated by commas, or text for the first folder's tokenizer.

    Returns:
        ``max_abs``, ``equal`` (bit for bit), ``tokens``, ``shape``.

    Raises:
        UnsupportedError: one of them cannot be loaded or run.
    """
    request = json.dumps({"folders": [str(first), str(second)], "prompt": prompt})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.run(
        [sys.executable, "-m", __name__], input=request.encode(), capture_output=True, env=environment, check=False
    )
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise UnsupportedError(f"the logits could not be computed (exit {child.returncode})") from None
    if "failed" in answer:
        raise UnsupportedError(f"the logits could not be computed: {answer['failed']}")
    return {key: answer[key] for key in ("equal", "max_abs", "shape", "tokens")}


def _main() -> None:
    request = json.load(sys.stdin)
    try:
        answer = _run(request["folders"], request["prompt"])
    except Exception as fault:  # whatever transformers raises for a folder
        answer = {"failed": f"{type(fault).__name__}: {fault}"[:500]}
    print("\n" + json.dumps(answer))


def _run(folders: list[str], prompt: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if re.fullmatch(r"[\d,\s]+", prompt):
        tokens = [int(number) for number in re.findall(r"\d+", prompt)]
    else:
        tokens = AutoTokenizer.from_pretrained(folders[0])(prompt)["input_ids"]
    logits = []
    for folder in folders:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        with torch.no_grad():
            model.eval()
            logits.append(model(torch.tensor([tokens])).logits.float())
        del model
    same_shape = logits[0].shape == logits[1].shape
    distance = float((logits[0] - logits[1]).abs().max()) if same_shape else float("inf")
    return {
        "equal": same_shape and torch.equal(logits[0], logits[1]),
        "max_abs": distance,
        "shape": list(logits[0].shape),
        "tokens": tokens,
    }


if __name__ == "__main__":
    _main()
