"""The command as a process of its own: imports, streams, signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]

# Runs the command in-process and prints which of the heavy packages it has imported.
SPY = """
import sys
from streammerge.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "transformers", "peft", "huggingface_hub"}
    print("IMPORTED", sorted({name.split(".")[0] for name in sys.modules} & heavy))
"""
# The same with writes that take their time, so that a signal comes while the merge runs.
SLOW = """
import os, sys, time
from streammerge import files
from streammerge.cli.main import main
write = files.pwrite_all
def slow(*arguments):
    print("writing", file=sys.stderr, flush=True)
    time.sleep(0.1)
    write(*arguments)
files.pwrite_all = slow
main(sys.argv[1:])
"""


def test_python_m(command: Command, tiny: Path, tmp_path: Path) -> None:
    done = command(tiny, tmp_path / "merged", "--no-check")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"wrote           {tmp_path / 'merged'}")


def test_json_and_nothing_else_on_stdout(command: Command, tiny: Path, tmp_path: Path) -> None:
    done = command("merge", tiny, tmp_path / "merged", "--no-check", "--json")
    assert json.loads(done.stdout)["tensors"] == 27
    assert "merging" in done.stderr


def test_failure_has_no_traceback(command: Command, tmp_path: Path) -> None:
    done = command(tmp_path / "nowhere", tmp_path / "merged")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'nowhere'} does not exist\n" or "error: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["inspect", "{source}"], ["plan", "{source}", "{out}"], ["{source}", "{out}", "--no-check"]],
)
def test_light_imports(arguments: list[str], tiny: Path, tmp_path: Path) -> None:
    """Neither looking nor the usual merge pays for torch."""
    line = [part.format(source=tiny, out=tmp_path / "merged") for part in arguments]
    done = subprocess.run([sys.executable, "-c", SPY, *line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "IMPORTED []", done.stdout + done.stderr


def test_reader_that_goes_away(tiny: Path) -> None:
    """``streammerge inspect ... | head -1`` ends quietly."""
    line = f"{sys.executable} -m streammerge inspect {tiny} --tensors | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() in ("0", "141")


def slow_merge(source: Path, destination: Path, *options: str) -> subprocess.Popen[str]:
    """Starts a merge whose writes are slow and waits for the first of them."""
    line = [sys.executable, "-c", SLOW, "merge", str(source), str(destination), "--no-check", *options]
    line += ["--workers", "1", "--max-shard-size", "100KB", "--json"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "writing" not in process.stderr.readline():
        assert process.poll() is None
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_stopped_by_a_signal(number: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    process = slow_merge(tiny, tmp_path / "merged")
    asked = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert time.monotonic() - asked < 2
    assert json.loads(out)["error"] == {
        "type": "StoppedError",
        "message": json.loads(out)["error"]["message"],
        "exit_code": 75,
    }
    assert "Traceback" not in err
    assert not (tmp_path / "merged").exists()


def test_stopped_and_started_again(
    command: Command, tiny: Path, tmp_path: Path, contents: Callable[[Path], dict[str, str]]
) -> None:
    """The same command again gives the whole folder."""
    process = slow_merge(tiny, tmp_path / "merged")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    for name in ("merged", "fresh"):
        assert command(tiny, tmp_path / name, "--no-check", "--max-shard-size", "100KB").returncode == 0
    assert contents(tmp_path / "merged") == contents(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "merged"]


def test_killed(command: Command, tiny: Path, tmp_path: Path) -> None:
    """Even SIGKILL leaves nothing under the final name, and does not get in the way later."""
    process = slow_merge(tiny, tmp_path / "merged")
    process.kill()
    process.communicate(timeout=30)
    assert not (tmp_path / "merged").exists()
    assert command(tiny, tmp_path / "merged", "--no-check").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_two_at_once(command: Command, tiny: Path, tmp_path: Path) -> None:
    process = slow_merge(tiny, tmp_path / "merged")
    second = command(tiny, tmp_path / "merged", "--no-check")
    assert second.returncode == 9
    assert "another merge" in second.stderr
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(json.loads(out)["files"]) > 5


def test_signal_while_replicas_are_compared(tiny: Path, tmp_path: Path) -> None:
    """Comparing reads as much as merging may; it stops as well."""
    code = """
import os, signal, sys
from streammerge.execute import compare
real, sent = compare.run_copies, []
def hit(*arguments):
    if not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return real(*arguments)
compare.run_copies = hit
from streammerge.cli.main import main
main(sys.argv[1:])
"""
    line = [sys.executable, "-c", code, str(tiny), str(tmp_path / "merged"), "--no-check", "--tie-word-embedding"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75, done.stderr
    assert "\nmerging" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_signal_during_the_commit(tiny: Path, tmp_path: Path) -> None:
    """One signal after the last byte: done or stopped, never the code of a second Ctrl-C."""
    code = """
import os, signal, sys
from streammerge import files
real = files.rename
def hit(source, target):
    os.kill(os.getpid(), signal.SIGTERM)
    real(source, target)
files.rename = hit
from streammerge.cli.main import main
main(sys.argv[1:])
"""
    line = [sys.executable, "-c", code, str(tiny), str(tmp_path / "merged"), "--no-check"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 75), done.stderr
    complete = (tmp_path / "merged" / "model.safetensors").is_file()
    assert complete == (done.returncode == 0)
    assert complete == ("merged.streammerge-partial" not in {path.name for path in tmp_path.iterdir()})
