"""The ``streammerge`` command."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from streammerge import pipeline
from streammerge.cli.options import (
    CONTEXT,
    MODEL_FIELDS,
    compare_options,
    json_option,
    merge_options,
    model_options,
    resource_options,
    source_options,
)
from streammerge.cli.progress import ConsoleObserver, QuietObserver
from streammerge.errors import DifferenceError, StoppedError, StreammergeError, UsageError
from streammerge.pipeline.prepare import budget_of
from streammerge.sizes import format_size
from streammerge.version import __version__

__all__ = ["cli", "main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PATIENCE_SECONDS = 2.0

_PATHS = click.argument("paths", nargs=-1, type=click.Path(path_type=Path))


class _MergeByDefault(click.Group):
    """A group whose command may be left out: ``streammerge SRC DST`` merges."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((arg for arg in args if not arg.startswith("-")), None)
        own = {"-h", "--help", "--version"}
        if args and first not in self.commands and not own.intersection(args[:1]):
            args = ["merge", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_MergeByDefault, context_settings=CONTEXT)
@click.version_option(__version__)
def cli() -> None:
    """Merge the pieces that distributed LLM training leaves on disk into a Hugging Face folder.

    \b
    streammerge [merge] SRC... DST     merge; DST appears when it is complete
    streammerge inspect SRC...         what is this?
    streammerge plan SRC... DST        what would be written
    streammerge compare A B            any two checkpoints in any formats
    streammerge test SRC --against HF  the merge that would be written, compared
    streammerge verify DST             is this folder whole and sane?

    Sizes: 16G and 16GiB are 2^30-based, 16GB is 10^9-based, a bare number is bytes.
    Exit codes: 0 done, 2 usage, 3 source incomplete or corrupt, 4 not supported, 5 unsafe content,
    6 no space or I/O error, 7 budget too small, 8 they differ, 9 destination exists or is locked, 75 stopped.
    """


@cli.command(context_settings=CONTEXT)
@_PATHS
@source_options
@merge_options
@model_options
@click.option(
    "--push-to-hub",
    "--hf-upload-path",
    "push_to_hub",
    metavar="REPO",
    help="Upload the finished folder to this Hub repository.",
)
@click.option("--private", is_flag=True, help="Make the Hub repository private.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@json_option
def merge(
    paths: tuple[Path, ...], as_json: bool, quiet: bool, push_to_hub: str | None, private: bool, **options: Any
) -> None:
    """Merge SRC... into the folder DST."""
    sources, destination, chosen = _arguments(paths, options)
    max_ram = _budget(chosen, quiet=quiet or as_json)
    observer = QuietObserver() if quiet else ConsoleObserver(max_ram)
    with _stopping() as stop:
        report = pipeline.merge(
            sources,
            destination,
            observer=observer,
            stop=stop,
            push_to_hub=push_to_hub,
            private=private,
            **{**chosen, "max_ram": max_ram},
        )
    if isinstance(observer, ConsoleObserver):
        observer.close()
    _print(report, as_json)


@cli.command(context_settings=CONTEXT)
@_PATHS
@source_options
@merge_options
@model_options
@json_option
def plan(paths: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Say what merging SRC... into DST would write, without reading a weight."""
    sources, destination, chosen = _arguments(paths, options)
    _print(pipeline.plan(sources, destination, **chosen), as_json)


@cli.command(context_settings=CONTEXT)
@_PATHS
@source_options
@click.option("--tensors", is_flag=True, help="List every tensor.")
@json_option
def inspect(paths: tuple[Path, ...], as_json: bool, tensors: bool, **options: Any) -> None:
    """Say what SRC... is: format, ranks, meshes, tensors, what is missing."""
    given = [*options["sources"], *([options["local_dir"]] if options["local_dir"] else []), *paths]
    chosen = {name: options[name] for name in ("mesh_order", "subtree", "backend")}
    report = pipeline.inspect(given, **chosen)
    _print(report, as_json)
    if tensors and not as_json:
        for name, tensor in report.tensors.items():
            click.echo(f"{name}  {tensor['dtype']}  {tensor['shape']}  {tensor['fragments']} fragments")


@cli.command(context_settings=CONTEXT)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@compare_options
@resource_options
@click.option("--subtree", metavar="PATH", help="Which set of tensors to take where a checkpoint holds several.")
@click.option("--logits", metavar="TOKENS|TEXT", help="Also load both with transformers and compare logits on these.")
@json_option
def compare(first: Path, second: Path, as_json: bool, worst: int, **options: Any) -> int:
    """Compare FIRST with SECOND: any two checkpoints in any supported formats."""
    observer = ConsoleObserver(budget_of(options["max_ram"]))
    with _stopping():
        report = pipeline.compare(first, second, observer=observer, **options)
    observer.close()
    return _judged(report, report.equal, report.lines(worst), as_json)


@cli.command(context_settings=CONTEXT)
@_PATHS
@source_options
@merge_options
@model_options
@compare_options
@click.option("--against", "--test-hf-dir", "against", type=click.Path(path_type=Path), help="What to compare with.")
@json_option
def test(paths: tuple[Path, ...], as_json: bool, worst: int, against: Path | None, **options: Any) -> int:
    """Compare the merge of SRC... that would be written with a reference; nothing is written."""
    if against is None:
        raise UsageError("name what to compare with: streammerge test SRC --against HF_DIR")
    sources, _, chosen = _arguments((*paths, against), options)
    observer = ConsoleObserver(budget_of(chosen["max_ram"]))
    with _stopping():
        report = pipeline.test(sources, against, observer=observer, **chosen)
    observer.close()
    return _judged(report, report.equal, report.lines(worst), as_json)


@cli.command(context_settings=CONTEXT)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--max-ram", metavar="SIZE", help="RAM budget.")
@click.option("--io", type=click.Choice(["auto", "direct", "pread", "mmap"]), default="auto", help="How to read.")
@json_option
def verify(folder: Path, as_json: bool, max_ram: str | None, io: str) -> int:
    """Check a merged FOLDER: index, headers, model class, values, checksums."""
    observer = ConsoleObserver(budget_of(max_ram))
    with _stopping():
        report = pipeline.verify(folder, max_ram=max_ram, io=io, observer=observer)
    observer.close()
    return _judged(report, report.whole, report.lines(), as_json)


def _judged(report: Any, fine: bool, lines: list[str], as_json: bool) -> int:
    _echo(_json(report) if as_json else "\n".join(lines))
    return 0 if fine else DifferenceError.exit_code


def _json(report: Any) -> str:
    return json.dumps(_finite(report.to_dict()), indent=2)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _arguments(paths: tuple[Path, ...], options: dict[str, Any]) -> tuple[list[Path], Path, dict[str, Any]]:
    """Sources, destination and the options of the pipeline, from either spelling."""
    given = list(paths)
    destination = options.pop("target_dir")
    sources = [*options.pop("sources")]
    local = options.pop("local_dir")
    if local is not None:
        sources.append(local)
    if destination is None and given:
        destination = given.pop()
    sources += given
    if destination is None or not sources:
        raise UsageError("name a source and a destination: streammerge SRC... DST (see --help)")
    options["value_model"] = options.pop("is_value_model")
    given_sizes = {name: options.pop(name) for name in MODEL_FIELDS}
    options["model_fields"] = {name: value for name, value in given_sizes.items() if value is not None}
    options["space_check"] = not options.pop("no_space_check")
    options["tie_word_embeddings"] = options.pop("tie_word_embedding")
    return sources, destination, options


def _budget(options: dict[str, Any], *, quiet: bool) -> int:
    """The budget in bytes; says what was understood."""
    budget = budget_of(options["max_ram"])
    if not quiet:
        click.echo(f"RAM budget {format_size(budget)} ({budget} bytes)", err=True)
    return budget


def _print(report: Any, as_json: bool) -> None:
    _echo(_json(report) if as_json else repr(report))


def _echo(text: str) -> None:
    """Print on stdout; a reader that went away (``| head``) is no error of ours."""
    try:
        click.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """While inside, SIGINT, SIGTERM and SIGUSR1 (Slurm's notice) stop the merge wherever it is.

    Launchers often send a signal twice at once, so a second one counts only after two seconds.
    """
    stop = threading.Event()
    asked_at: float | None = None

    def asked(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            stop.set()
            raise StoppedError("stopped on request; what was done is kept, and the same command goes on from there")
        if time.monotonic() - asked_at > _PATIENCE_SECONDS:
            raise KeyboardInterrupt

    former = {number: signal.signal(number, asked) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and exit with the documented code."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(_guarded(lambda: cli.main(args=given, prog_name="streammerge", standalone_mode=False), "--json" in given))


def _guarded(command: Callable[[], Any], as_json: bool) -> int:
    try:
        result = command()
        return result if isinstance(result, int) else 0
    except StreammergeError as fault:
        return _failed(type(fault).__name__, str(fault), fault.exit_code, as_json)
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message())
        return UsageError.exit_code
    except click.ClickException as fault:
        return _failed("UsageError", fault.format_message(), 2, as_json)
    except (click.Abort, KeyboardInterrupt):
        return _failed("StoppedError", "stopped", 128 + signal.SIGINT, as_json)
    except Exception as fault:
        if os.environ.get("STREAMMERGE_DEBUG"):
            raise
        message = (
            f"unexpected {type(fault).__name__}: {fault}. "
            "This is a bug in streammerge; run with STREAMMERGE_DEBUG=1 and report it"
        )
        return _failed(type(fault).__name__, message, 1, as_json)


def _failed(kind: str, message: str, code: int, as_json: bool) -> int:
    click.echo(f"error: {message}", err=True)
    if as_json:
        click.echo(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    return code
