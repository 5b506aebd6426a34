"""What the commands return: small typed reports with a readable ``repr`` and ``to_dict()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streammerge.execute.difference import Difference
from streammerge.sizes import format_size

__all__ = ["CompareReport", "InspectReport", "MergeReport", "PlanReport", "TensorReport", "VerifyReport"]


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
        lora: what became of the LoRA adapter, if there was one.
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
    lora: str = ""
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
        if self.lora:
            out.append(f"LoRA            {self.lora}")
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


@dataclass(frozen=True, slots=True)
class TensorReport:
    """How one tensor differs between two checkpoints.

    Attributes:
        dtypes: on the first side and on the second.
        differing: elements that are not equal; ``elements`` is how many there are.
        max_abs, max_rel: largest difference, absolute and relative to the second value (where that
            is not zero).
        first: index of the first differing element, or None.
        values: both values there.
        nan_both, nan_one: elements that are NaN on both sides, or on one only.
        equal: whether the tensors count as equal.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    elements: int
    differing: int
    max_abs: float
    max_rel: float
    first: tuple[int, ...] | None
    values: tuple[Any, Any] | None
    nan_both: int
    nan_one: int
    equal: bool

    @classmethod
    def of(
        cls, name: str, shape: tuple[int, ...], dtypes: tuple[str, str], found: Difference, dtype_aware: bool
    ) -> TensorReport:
        """Make one of what was counted. Another dtype is a difference, unless the comparison is aware of it."""
        same_dtype = dtype_aware or dtypes[0] == dtypes[1]
        return cls(
            name,
            shape,
            dtypes,
            found.elements,
            found.differing,
            found.max_abs,
            found.max_rel,
            found.first,
            found.values,
            found.nan_both,
            found.nan_one,
            same_dtype and not found.differing,
        )

    def line(self) -> str:
        """One row of the table."""
        if not self.differing:
            return f"  {self.name}: {self.dtypes[0]} against {self.dtypes[1]}, equal values"
        where = (
            f"first at {list(self.first or ())}: {self.values[0]!r} against {self.values[1]!r}" if self.values else ""
        )
        nan = f", {self.nan_one} NaN on one side only" if self.nan_one else ""
        dtypes = "" if self.dtypes[0] == self.dtypes[1] else f", {self.dtypes[0]} against {self.dtypes[1]}"
        return (
            f"  {self.name}: {self.differing} of {self.elements} differ, max abs {self.max_abs:.3g}, "
            f"max rel {self.max_rel:.3g}{nan}{dtypes}; {where}"
        )


@dataclass(frozen=True, repr=False)
class CompareReport(_Report):
    """How two checkpoints differ.

    Attributes:
        compared: number of tensors compared; ``elements`` is their elements.
        missing: names that only the second has.
        extra: names that only the first has.
        shapes: name -> (first shape, second shape) where they differ.
        tensors: those that are not equal, the worst first.
        nan_both: elements that are NaN on both sides, counted as equal.
        rtol, atol: the tolerance; 0 for exact.
        peak_rss: bytes.
        logits: outcome of running the same tokens through both, if asked for.
    """

    first: str
    second: str
    compared: int
    elements: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: Mapping[str, tuple[list[int], list[int]]]
    tensors: tuple[TensorReport, ...]
    nan_both: int
    rtol: float
    atol: float
    peak_rss: int
    logits: Mapping[str, Any] | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs (the logits may, by the tolerance of the values)."""
        same_logits = self.logits is None or self.logits["equal"] or bool(self.rtol or self.atol)
        return same_logits and not (self.missing or self.extra or self.shapes or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {"equal": self.equal, **super().to_dict()}

    def lines(self, worst: int = 20) -> list[str]:
        """The report for people, line by line."""
        how = "exactly" if not (self.rtol or self.atol) else f"within rtol {self.rtol:g}, atol {self.atol:g}"
        out = [f"first           {self.first}", f"second          {self.second}"]
        out.append(f"compared        {self.compared} tensors, {self.elements:,} elements")
        if self.nan_both:
            out.append(f"NaN             {self.nan_both} elements are NaN on both sides and count as equal")
        if self.missing:
            out.append(f"only in second  {len(self.missing)}: {_some(list(self.missing))}")
        if self.extra:
            out.append(f"only in first   {len(self.extra)}: {_some(list(self.extra))}")
        out += [f"shape           {name}: {a} against {b}" for name, (a, b) in self.shapes.items()]
        if self.tensors:
            out.append(f"differing       {len(self.tensors)} tensors, the worst first:")
            out += [tensor.line() for tensor in self.tensors[:worst]]
        if self.logits is not None:
            same = "equal" if self.logits["equal"] else f"differ by at most {self.logits['max_abs']:.3g}"
            out.append(f"logits          {same} on {len(self.logits['tokens'])} tokens")
        out.append(f"peak RSS        {format_size(self.peak_rss)}")
        return [*out, f"result          they are equal, {how}" if self.equal else "result          they differ"]


@dataclass(frozen=True, repr=False)
class VerifyReport(_Report):
    """Whether a merged folder is whole and sane.

    Attributes:
        path: the folder.
        tensors, parameters, bytes: of its weights.
        checked: what was checked, in words.
        problems: what is wrong; empty when the folder is whole.
        warnings: what is unusual, but not wrong by itself.
    """

    path: str
    tensors: int
    parameters: int
    bytes: int
    checked: tuple[str, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {"whole": self.whole, **super().to_dict()}

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        out = [f"path            {self.path}"]
        out.append(f"weights         {self.tensors} tensors, {self.parameters:,} parameters, {format_size(self.bytes)}")
        out += [f"checked         {what}" for what in self.checked]
        out += [f"problem         {problem}" for problem in self.problems]
        out += [f"warning         {warning}" for warning in self.warnings]
        return [*out, f"result          {'whole' if self.whole else 'not whole'}"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _rules(dropped: Mapping[str, str]) -> str:
    return "; ".join(f"{count} ({reason})" for reason, count in Counter(dropped.values()).most_common())


def _counts(dtypes: Mapping[str, int]) -> str:
    return ", ".join(dtypes) if len(dtypes) == 1 else ", ".join(f"{n} {name}" for name, n in dtypes.items())
