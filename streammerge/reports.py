"""What the commands return: small typed reports with a readable ``repr`` and ``to_dict()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streammerge.sizes import format_size

__all__ = ["InspectReport", "MergeReport", "PlanReport"]


class _Report:
    """Shared by the reports: plain data out, and the text of ``lines`` as ``repr``."""

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def __repr__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, repr=False)
class InspectReport(_Report):
    """What a source is.

    Attributes:
        format: on-disk format.
        path: where it was found.
        facts: world size, device meshes and so on.
        tensors: name -> {dtype, shape, bytes, fragments}.
        parameters: elements of all tensors.
        bytes: of all tensors, one replica.
        skipped: keys that hold no weight -> why.
        architecture: model class of the config found beside it.
        missing: what a loadable folder would lack.
        warnings: what the user should know.
    """

    format: str
    path: str
    facts: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]
    parameters: int
    bytes: int
    skipped: Mapping[str, str]
    architecture: str | None
    missing: tuple[str, ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        dtypes = Counter(str(tensor["dtype"]) for tensor in self.tensors.values())
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        out = [f"format          {self.format}", f"path            {self.path}"]
        out += [f"{name:<15} {value}" for name, value in self.facts.items()]
        out.append(f"model           {self.architecture or 'unknown (no config.json)'}")
        out.append(f"tensors         {len(self.tensors)} ({kinds})")
        out.append(f"parameters      {self.parameters:,}")
        out.append(f"size            {format_size(self.bytes)}")
        if self.skipped:
            out.append(f"no weights      {len(self.skipped)} entries: {_some(list(self.skipped))}")
        if self.missing:
            out.append(f"not found       {', '.join(self.missing)} (name a folder that has them with --hf-config)")
        return out + [f"warning         {warning}" for warning in self.warnings]


@dataclass(frozen=True, repr=False)
class PlanReport(_Report):
    """What a merge would do.

    Attributes:
        destination: the folder it would write.
        plan: the plan as plain data.
        copied: files beside the weights.
        tied: names left out because they equal another tensor (checked when merging).
        dropped: name -> the rule that leaves it out.
        max_ram: budget in bytes.
        estimated_ram: peak RSS in bytes at most.
        disk: bytes to be written.
        estimated_seconds: at one GB/s of reading and of writing, one after the other.
        missing: what the folder will lack.
        warnings: what the user should know.
    """

    destination: str
    plan: Mapping[str, Any]
    copied: tuple[str, ...]
    tied: tuple[str, ...]
    dropped: Mapping[str, str]
    max_ram: int
    estimated_ram: int
    disk: int
    estimated_seconds: float
    missing: tuple[str, ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        out = [f"would write     {self.destination}"]
        out += [
            f"  {file['name']:<34} {len(file['tensors']):>6} tensors {format_size(file['size']):>11}"
            for file in self.plan["files"]
        ]
        out.append(f"parameters      {self.plan['parameters']:,}")
        casts = ", ".join(f"{stored} -> {written}" for stored, written in self.plan["casts"])
        out.append(f"casts           {casts or 'none'}")
        if self.tied:
            out.append(f"tied            {_some(list(self.tied))}, left out if equal (compared when merging)")
        if self.dropped:
            out.append(f"left out        {_rules(self.dropped)}")
        out.append(f"files beside    {', '.join(self.copied) or 'none'}")
        out.append(f"reads           {format_size(self.plan['read_size'])}")
        out.append(f"disk needed     {format_size(self.disk)}")
        out.append(f"peak RAM        at most {format_size(self.estimated_ram)} of {format_size(self.max_ram)}")
        out.append(f"time            about {self.estimated_seconds:.0f} s on a disk of 1 GB/s")
        if self.missing:
            out.append(f"will lack       {', '.join(self.missing)}")
        return out + [f"warning         {warning}" for warning in self.warnings]


@dataclass(frozen=True, repr=False)
class MergeReport(_Report):
    """What a merge did.

    Attributes:
        destination: the finished folder.
        files: names of all files written.
        tensors: number of tensors written.
        parameters: their elements.
        tied: names left out because they equal another tensor.
        dropped: name -> the rule that left it out.
        skipped: keys that held no weight -> why.
        stored_dtypes, written_dtypes: dtype -> number of tensors written.
        bytes_read, bytes_written: of weight files.
        bytes_kept: found as an interrupted merge had left them.
        seconds: wall time from start to the final rename.
        peak_rss: bytes, of this process, its whole life.
        max_ram: budget in bytes.
        missing: what the folder lacks to be loadable.
        check: outcome of the comparison with the model class.
        uploaded: address of the Hub repository, when it was pushed.
        warnings: what the user should know.
    """

    destination: str
    files: tuple[str, ...]
    tensors: int
    parameters: int
    tied: tuple[str, ...]
    dropped: Mapping[str, str]
    skipped: Mapping[str, str]
    stored_dtypes: Mapping[str, int]
    written_dtypes: Mapping[str, int]
    bytes_read: int
    bytes_written: int
    bytes_kept: int
    seconds: float
    peak_rss: int
    max_ram: int
    missing: tuple[str, ...]
    check: str
    uploaded: str | None = None
    warnings: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        rate = self.bytes_written / max(self.seconds, 1e-9) / 1e9
        out = [f"wrote           {self.destination}"]
        out.append(f"tensors         {self.tensors} written ({self.parameters:,} parameters)")
        if self.tied:
            out.append(f"tied            {len(self.tied)} not written, equal to another: {_some(list(self.tied))}")
        if self.dropped:
            out.append(f"left out        {_rules(self.dropped)}")
        if self.skipped:
            out.append(f"no weights      {len(self.skipped)} entries: {_some(list(self.skipped))}")
        out.append(f"dtype           {_counts(self.stored_dtypes)} stored, {_counts(self.written_dtypes)} written")
        out.append(f"model class     {self.check}")
        out.append(
            f"moved           {format_size(self.bytes_read)} read, {format_size(self.bytes_written)} written "
            f"in {self.seconds:.1f} s ({rate:.2f} GB/s)"
        )
        if self.bytes_kept:
            out.append(f"resumed         {format_size(self.bytes_kept)} were there from an interrupted merge")
        out.append(f"peak RSS        {format_size(self.peak_rss)} of {format_size(self.max_ram)}")
        if self.missing:
            out.append(f"missing         {', '.join(self.missing)}: add them, or merge again with --hf-config")
        if self.uploaded:
            out.append(f"uploaded        {self.uploaded}")
        return out


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _rules(dropped: Mapping[str, str]) -> str:
    return "; ".join(f"{count} ({reason})" for reason, count in Counter(dropped.values()).most_common())


def _counts(dtypes: Mapping[str, int]) -> str:
    return ", ".join(dtypes) if len(dtypes) == 1 else ", ".join(f"{n} {name}" for name, n in dtypes.items())
