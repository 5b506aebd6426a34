"""Merge one checkpoint with streammerge, verl's merger, cp and a bare direct copy, in turn, and compare."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import digests
from benchmarks.contenders import (
    BUDGET,
    RATIOS,
    Contender,
    contenders,
    dcp_contenders,
    dcp_files,
    merge_command,
    rank_files,
)
from benchmarks.machine import describe_machine, today, versions, versions_in
from benchmarks.measure import drop_caches, first_byte_seconds, measure
from benchmarks.peer import PEER_PACKAGES, peer_environment
from benchmarks.results import dump, medians, own_command, place_names, ratio, scrubbed

_DIGESTS = {"file": digests.file_digest, "tensor": digests.tensor_digest}


@dataclass
class _Arena:
    """The checkpoint, a place to write, and what has been measured so far."""

    actor: Path
    work: Path
    names: dict[str, str]
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    cold: bool = True

    def run(self, contender: Contender) -> dict[str, Any]:
        """One run in an empty folder, which is removed afterwards."""
        target = self.work / "out" / contender.name
        _remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.cold = drop_caches() and self.cold
        try:
            measured = measure(contender.command(self.actor, target), target, limit=contender.memory_limit)
            run = measured.to_dict()
            if measured.exit_code == 0:
                run["digests"] = {kind: _DIGESTS[kind](target) for kind in contender.digests}
        except OSError as fault:  # no cgroup to limit
            run = {"exit_code": 1, "stderr_tail": str(fault)}
        finally:
            _remove(target)
        if "stderr_tail" in run:
            run["stderr_tail"] = scrubbed(run["stderr_tail"], self.names)
        self.runs.setdefault(contender.name, []).append(run)
        return run

    def command(self, contender: Contender) -> str:
        """The contender's command with the paths' names instead of the paths."""
        return scrubbed(" ".join(contender.command(self.actor, self.work / "out")), self.names)


def _remove(target: Path) -> None:
    for path in (target, target.with_name(target.name + ".streammerge-partial")):
        shutil.rmtree(path, ignore_errors=True)


def digest_checks(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, bool]:
    """What the digests say: per contender, whether all rounds wrote the same; and whether verl wrote the same."""
    seen: dict[str, dict[str, set[str]]] = {}
    for name, rounds in runs.items():
        for run in rounds:
            for kind, digest in run.get("digests", {}).items():
                seen.setdefault(name, {}).setdefault(kind, set()).add(digest)
    checks = {
        f"{name}: the same in every round": all(len(found) == 1 for found in kinds.values())
        for name, kinds in seen.items()
    }
    ours, theirs = (seen.get(name, {}).get("tensor") for name in ("streammerge-bf16", "verl"))
    if ours and theirs:
        checks["verl and streammerge-bf16: the same tensors, bit for bit"] = ours == theirs
    return checks


def ratios(found: Mapping[str, Mapping[str, float | None]]) -> list[dict[str, Any]]:
    """For each pair of ``RATIOS`` that was measured, the ratio of its medians of the durable time."""
    return [
        {"first": first, "second": second, "ratio": ratio(a["durable_seconds"], b["durable_seconds"])}
        for first, second in RATIOS
        if (a := found.get(first)) and (b := found.get(second))
    ]


def first_byte(work: Path, rounds: int) -> dict[str, Any]:
    """Time to the first byte of a merge of a checkpoint of 8 small rank files, files in the page cache."""
    source, target = work / "small", work / "small-out"
    make = [sys.executable, "-m", "benchmarks.make_checkpoint", str(source), "--preset", "tiny", "--world-size", "8"]
    shutil.rmtree(source, ignore_errors=True)
    measure(make, source)
    seconds = []
    for _ in range(rounds):
        _remove(target)
        staging = target.with_name(target.name + ".streammerge-partial") / "model"
        seconds.append(round(first_byte_seconds(merge_command(source, target, "keep"), (staging, target)), 3))
    _remove(target)
    shutil.rmtree(source)
    return {"seconds": seconds, "median": median(seconds)}


def _peer(folder: Path | None) -> tuple[Path | None, dict[str, Any]]:
    """The interpreter for verl's merger and its versions, or the reason why there is none."""
    if folder is None:
        return None, {"failure": "not asked for"}
    try:
        python = peer_environment(folder)
        return python, {"versions": versions_in(python, PEER_PACKAGES)}
    except (RuntimeError, OSError) as fault:
        return None, {"failure": str(fault)}


def _rounds(arena: _Arena, taking_part: Sequence[Contender], rounds: int) -> None:
    for number in range(1, rounds + 1):
        # Another one begins each round: a disk that is still freeing what was removed slows the next run.
        first = (number - 1) % len(taking_part)
        for contender in (*taking_part[first:], *taking_part[:first]):
            run = arena.run(contender)
            outcome = f"{run['seconds']:.2f} s" if run["exit_code"] == 0 else f"failed: {run['stderr_tail'][-200:]}"
            click.echo(f"round {number}/{rounds}  {contender.name:<20} {outcome}", err=True)


def compare(
    source: Path, work: Path, *, rounds: int, peer: Path | None, written_share: float, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Run all contenders ``rounds`` times in turn; returns the result as plain data.

    Args:
        source: the checkpoint.
        work: folder on the disk to be measured, for the outputs.
        rounds: runs of each contender.
        peer: where verl's environment is or is made; None leaves verl out.
        written_share: bytes of the cast output by bytes of the input.
        only: names of contenders; empty for all.
    """
    files = dcp_files(source) or rank_files(source)
    is_dcp = files[0].suffix == ".distcp"
    python, peer_facts = _peer(peer)
    names = place_names(SOURCE=source, WORK=work, PEER=peer)
    peer_facts = {key: scrubbed(v, names) if isinstance(v, str) else v for key, v in peer_facts.items()}
    arena = _Arena(files[0].parent, work, names)
    everyone = dcp_contenders() if is_dcp else contenders(written_share, python)
    taking_part = [one for one in everyone if not only or one.name in only]
    _rounds(arena, taking_part, rounds)
    found = {name: medians(runs) for name, runs in arena.runs.items()}
    return {
        "kind": "peers-dcp" if is_dcp else "peers",
        "date": today(),
        "command": own_command("benchmarks.compare_peers", names),
        "machine": describe_machine(work),
        "versions": versions(),
        "peer": peer_facts,
        "input": {"files": len(files), "bytes": sum(path.stat().st_size for path in files)},
        "max_ram": BUDGET,
        "cold_cache": arena.cold,
        "ratios": ratios(found),
        "checks": digest_checks(arena.runs),
        "first_byte": None if is_dcp else first_byte(work, rounds),
        "contenders": [
            {"name": one.name, "title": one.title, "command": arena.command(one)}
            | {"memory_limit": one.memory_limit, "medians": found[one.name], "runs": arena.runs[one.name]}
            for one in taking_part
        ],
    }


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--output", type=click.Path(path_type=Path), default=Path("benchmarks/results/peers.json"))
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each contender.")
@click.option("--peer", type=click.Path(path_type=Path), help="Folder of verl's environment.  [default: WORK/peer]")
@click.option("--no-peer", is_flag=True, help="Leave verl out.")
@click.option("--written-share", type=float, default=0.5, show_default=True, help="Cast output by input, in bytes.")
@click.option("--only", multiple=True, help="Run only this contender; may be repeated.")
def main(
    source: Path,
    work: Path,
    output: Path,
    rounds: int,
    peer: Path | None,
    no_peer: bool,
    written_share: float,
    only: tuple[str, ...],
) -> None:
    """Compare the tools on the checkpoint SOURCE, with outputs in the folder WORK, and write a JSON file."""
    work.mkdir(parents=True, exist_ok=True)
    chosen = None if no_peer else (peer or work / "peer")
    result = compare(source, work, rounds=rounds, peer=chosen, written_share=written_share, only=only)
    result["command"] = scrubbed(result["command"], {str(output): output.name})
    dump(result, output)
    for one in result["ratios"]:
        click.echo(f"{one['first']} takes {one['ratio']} times as long as {one['second']}")
    for check, held in result["checks"].items():
        click.echo(f"{'yes' if held else 'NO '}  {check}")


if __name__ == "__main__":
    main()
