"""SIGINT, SIGTERM and SIGUSR1 stop a merge in every phase: soon, with exit code 75, and the same command goes on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.harness import SMALL, process, start, tree
from tests.reliability.runner import Steps

STEPS = Steps(1 << 14, 1 << 14, inline=False)
SLOW = Steps(1 << 14, 1 << 14, inline=False, pause=0.3)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PATIENCE = 2.0


def stopped_in(phase: str, number: int, line: list[object], steps: Steps, after: float = 0.1) -> tuple[float, str]:
    """Send a signal some time after a phase has begun; returns the seconds until the end, and the messages."""
    run = start(*line, steps=steps)
    assert run.stderr is not None
    try:
        seen = ""
        for text in run.stderr:
            seen += text
            if text.startswith(phase):
                break
        time.sleep(after)
        assert run.poll() is None, f"over before the signal: {seen}"
        run.send_signal(number)
        began = time.monotonic()
        _, rest = run.communicate(timeout=30)
    except BaseException:
        run.kill()
        raise
    assert run.returncode == 75, seen + rest
    return time.monotonic() - began, rest


def check_message(rest: str) -> None:
    """One line, which says how to go on."""
    lines = [line for line in rest.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1, rest
    assert lines[0].startswith("error: stopped on request"), rest
    assert "same command" in lines[0], rest


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_merging(number: signal.Signals, tmp_path: Path) -> None:
    line: list[object] = [SMALL, tmp_path / "merged", "--no-check", "--max-shard-size", "60KB"]
    seconds, rest = stopped_in("merging", number, line, SLOW, after=0.5)
    assert seconds < PATIENCE
    assert not (tmp_path / "merged").exists()
    check_message(rest)
    check_resumed(line, tmp_path)


def check_resumed(line: list[object], tmp_path: Path) -> None:
    """The same command gives what an undisturbed one gives."""
    other = [tmp_path / "other" if word == tmp_path / "merged" else word for word in line]
    for command in (line, other):
        done = process(*command, steps=STEPS)
        assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "merged") == tree(tmp_path / "other")
    assert not list(tmp_path.glob("*partial*"))


def test_signal_while_comparing_replicas(
    write_checkpoint: Callable[..., Path],
    qwen2_state: dict[str, Any],
    qwen2_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A head of its own beside tied embeddings has to be compared with them."""
    state = qwen2_state | {"lm_head.weight": qwen2_state["model.embed_tokens.weight"].clone()}
    source = write_checkpoint(state, qwen2_config | {"tie_word_embeddings": True})
    line: list[object] = [source, tmp_path / "merged", "--no-check"]
    slow = Steps(1 << 14, 1 << 14, inline=False, pause=1.0)
    seconds, rest = stopped_in("comparing replicas", signal.SIGTERM, line, slow)
    assert seconds < PATIENCE
    assert not (tmp_path / "merged").exists()
    check_message(rest)
    check_resumed(line, tmp_path)


def test_signal_during_the_class_check(tmp_path: Path) -> None:
    line: list[object] = [SMALL, tmp_path / "merged", "--check"]
    seconds, rest = stopped_in("checking against", signal.SIGTERM, line, STEPS, after=0.3)
    assert seconds < PATIENCE
    assert not (tmp_path / "merged").exists()
    check_message(rest)
    left = subprocess.run(["pgrep", "-f", f"{tmp_path}"], capture_output=True, text=True, check=False).stdout
    assert not left.split(), "the check goes on without its parent"


def test_signal_while_the_small_files_are_written(tmp_path: Path) -> None:
    line: list[object] = [SMALL, tmp_path / "merged", "--no-check", "--max-shard-size", "10MB"]
    slow_end = Steps(1 << 20, 1 << 20, inline=False, pause=0.7)
    seconds, rest = stopped_in("merging", signal.SIGTERM, line, slow_end, after=1.5)
    assert seconds < PATIENCE
    assert not (tmp_path / "merged").exists()
    check_message(rest)
    check_resumed(line, tmp_path)


def test_signal_that_comes_twice_at_once(tmp_path: Path) -> None:
    """As launchers send it: the second is no impatience."""
    line: list[object] = [SMALL, tmp_path / "merged", "--no-check", "--max-shard-size", "60KB"]
    run = start(*line, steps=SLOW)
    assert run.stderr is not None
    for text in run.stderr:
        if text.startswith("merging"):
            break
    time.sleep(0.4)
    run.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, rest = run.communicate(timeout=30)
    assert run.returncode == 75, rest
    check_message(rest)
    check_resumed(line, tmp_path)
