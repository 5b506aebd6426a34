"""The commands as they are run: exit codes, JSON, the table, the budget, signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compare.compare_support import Run, write_folder
from tests.conftest import RunCommand
from tests.support.data import DATA

INF, NAN = float("inf"), float("nan")
MIB = 1 << 20


def test_exit_codes_and_result(run: Run, tmp_path: Path) -> None:
    same = [write_folder(tmp_path / name, {"a": torch.ones(3)}) for name in ("first", "second")]
    other = write_folder(tmp_path / "other", {"a": torch.zeros(3)})
    ran = run("compare", *same)
    assert (ran.code, "they are equal, exactly" in ran.out) == (0, True)
    ran = run("compare", same[0], other)
    assert (ran.code, "they differ" in ran.out) == (8, True)
    assert run("compare", same[0], other, "--atol", "2").code == 0
    assert "within rtol 0, atol 2" in run("compare", same[0], other, "--atol", "2").out


@pytest.mark.parametrize(
    "options", [["--rtol", "-1"], ["--atol", "-1"], ["--rtol", "nan"], ["--max-ram", "much"], ["--worst", "0"]]
)
def test_options_without_sense(run: Run, tmp_path: Path, options: list[str]) -> None:
    folder = write_folder(tmp_path / "first", {"a": torch.ones(3)})
    assert run("compare", folder, folder, *options).code == 2


def test_worst_rows_are_counted(run: Run, tmp_path: Path) -> None:
    first = write_folder(tmp_path / "first", {f"t{i}": torch.zeros(2) for i in range(9)})
    second = write_folder(tmp_path / "second", {f"t{i}": torch.full((2,), float(i)) for i in range(9)})
    rows = re.findall(r"^  (t\d): 2 of 2 differ", run("compare", first, second, "--worst", "3").out, re.M)
    assert rows == ["t8", "t7", "t6"]
    out = run("compare", first, second).out
    assert len(re.findall(r"^  t\d: ", out, re.M)) == 8
    assert "8 tensors" in out


def test_json_has_everything(run: Run, tmp_path: Path) -> None:
    """Also what the table leaves out; NaN and infinities become strings, as JSON has none."""
    first = {"a": torch.tensor([INF, NAN]), "b": torch.zeros(2), "n": torch.tensor(NAN), "c": torch.tensor([1j])}
    second = {"a": torch.tensor([NAN, -INF]), "b": torch.ones(3), "n": torch.tensor(NAN), "c": torch.tensor([2j])}
    folders = write_folder(tmp_path / "first", first), write_folder(tmp_path / "second", {**second, "d": torch.ones(1)})
    ran = run("compare", *folders, "--json", "--worst", "1")
    assert ran.code == 8

    def no_constant(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    report = json.loads(ran.out, parse_constant=no_constant)
    assert (report["equal"], report["missing"], report["extra"], report["compared"]) == (False, ["d"], [], 3)
    assert report["shapes"] == {"b": [[2], [3]]}
    assert (report["nan_both"], report["rtol"], report["logits"]) == (1, 0.0, None)
    found = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert set(found) == {"a", "c"}
    assert (found["a"]["values"], found["a"]["nan_one"], found["a"]["first"]) == (["inf", "nan"], 2, [0])
    assert found["c"]["values"] == ["1j", "2j"]


def test_json_of_a_failure(run: Run, tmp_path: Path) -> None:
    ran = run("compare", tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(ran.out)["error"]["exit_code"] == ran.code == 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """300 MB as one rank file, and in two folders: one equal, one with the very last element changed."""
    weights = {f"w{i}": torch.full((3000, 5000), 0.5 + i) for i in range(5)}
    folder = tmp_path_factory.mktemp("large")
    for name in ("ranks", "same", "other"):
        (folder / name).mkdir()
    torch.save(weights, folder / "ranks" / "model_world_size_1_rank_0.pt")
    save_file(weights, folder / "same" / "model.safetensors")
    weights["w4"][-1, -1] += 1
    save_file(weights, folder / "other" / "model.safetensors")
    return folder / "ranks", folder / "same", folder / "other"


def test_within_the_budget(large: tuple[Path, Path, Path], command: RunCommand) -> None:
    ranks, same, other = large
    for reference, workers, code in ((same, 2, 0), (other, 5, 8)):
        ran = command("compare", ranks, reference, "--max-ram", "256M", "--workers", workers, "--json")
        assert ran.returncode == code, ran.stderr
        report = json.loads(ran.stdout)
        assert report["peak_rss"] < 256 * MIB
        assert report["elements"] == 75_000_000
        assert [tensor["first"] for tensor in report["tensors"]] == ([] if code == 0 else [[2999, 4999]])


def test_within_a_small_budget_where_everything_differs(
    large: tuple[Path, Path, Path], command: RunCommand, tmp_path: Path
) -> None:
    """Differences take more memory than equality: masks and wide copies, also of 64-bit integers."""
    first = {"a": torch.arange(2_000_000), "b": torch.zeros(2_000_000)}
    second = {name: tensor + 1 for name, tensor in first.items()}
    folders = write_folder(tmp_path / "first", first), write_folder(tmp_path / "second", second)
    ran = command("compare", *folders, "--max-ram", "96M", "--json")
    assert ran.returncode == 8, ran.stderr
    assert json.loads(ran.stdout)["peak_rss"] < 96 * MIB


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_the_least_budget_that_is_named_works(command: RunCommand, workers: int) -> None:
    """A refusal says what would do, and that does, whatever the number of workers."""
    line = ["compare", DATA / "dcp_zstd_w2" / "ckpt", DATA / "dcp_zstd_w2" / "expected", "--workers", workers]
    refused = command(*line, "--max-ram", "20M")
    assert refused.returncode == 7
    assert "--max-ram 20.0 MiB" in refused.stderr
    least = re.search(r"least that works is (\d+M)", refused.stderr)
    assert least is not None
    assert command(*line, "--max-ram", least[1]).returncode == 0


def test_many_workers_share_a_budget(command: RunCommand) -> None:
    """As in a merge, there are fewer of them when memory is short."""
    folder = DATA / "dcp_zstd_w2"
    ran = command("compare", folder / "ckpt", folder / "expected", "--workers", "64", "--max-ram", "256M")
    assert ran.returncode == 0, ran.stderr


def test_casts_by_torch_are_in_the_budget(command: RunCommand, tmp_path: Path) -> None:
    """float16 is cast by torch, whose import alone takes some 200 MB: refuse, or stay within."""
    first = write_folder(tmp_path / "first", {"a": torch.ones(1000).half()})
    second = write_folder(tmp_path / "second", {"a": torch.ones(1000)})
    ran = command("compare", first, second, "--dtype-aware", "--max-ram", "128M", "--json")
    if ran.returncode != 7:
        assert json.loads(ran.stdout)["peak_rss"] < 128 * MIB


SLOW = """
import sys, time
from streammerge.execute import {module} as module
real = module.{name}
def slow(*arguments):
    print("reading weights", file=sys.stderr, flush=True)
    time.sleep(0.2)
    return real(*arguments)
module.{name} = slow
from streammerge.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", ["compare", "test", "verify"])
def test_stopped_by_a_signal(number: signal.Signals, what: str, large: tuple[Path, Path, Path]) -> None:
    ranks, same, _ = large
    arguments = {"compare": [ranks, same], "test": [ranks, "--against", same], "verify": [same]}[what]
    patch = (
        SLOW.format(module="engine", name="fill")
        if what == "verify"
        else SLOW.format(module="difference", name="run_copies")
    )
    line = [sys.executable, "-c", patch, what, *map(str, arguments), "--max-ram", "256M"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "reading weights" not in process.stderr.readline():
        assert process.poll() is None
    asked = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode in (75, 130), err
    assert time.monotonic() - asked < 2
    assert "Traceback" not in err
    assert "equal" not in out
