"""DCP items larger than the budget, and ones that would blow up: bounded memory and disk."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zstandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from streammerge.errors import UnsafeError
from tests.dcp.dcp_support import State, chunk_of, edited_metadata, save

MIB = 1 << 20
EXPERTS, ROWS, COLUMNS = 96, 2048, 2048
STEP = ROWS * COLUMNS * 4
STACK = "model.layers.0.mlp.experts.down_proj"
_MERGE = """
import json, sys, streammerge
source, target, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
report = streammerge.merge(source, target, max_ram="256M", check=False, **options)
print(json.dumps([report.peak_rss, report.bytes_written]))
"""


def run(source: Path, target: Path, limit: int | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    """Merge in a process of its own, with a limit on its address space."""
    command = [sys.executable, "-c", _MERGE, str(source), str(target), json.dumps(options)]

    def before() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, preexec_fn=before, capture_output=True, text=True, timeout=200)


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Path]:
    """Where to merge to; emptied at once, because it is large."""
    yield tmp_path / "merged"
    subprocess.run(["rm", "-rf", tmp_path / "merged"], check=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.5 GiB of fused experts in a single chunk, a hole but for the first and last numbers of each."""
    source = tmp_path_factory.mktemp("large") / "ckpt"
    save({"model.embed_tokens.weight": torch.ones(3, 2), STACK: torch.ones(1)}, source)
    path = source / "__0_1.distcp"
    with torch.serialization.skip_data():
        torch.save(torch.empty(EXPERTS, ROWS, COLUMNS), path)
    with edited_metadata(source) as metadata:
        entry, index = metadata.state_dict_metadata[STACK], chunk_of(metadata, STACK)
        entry.size = torch.Size([EXPERTS, ROWS, COLUMNS])
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0, 0]), entry.size)]
        del metadata.storage_data[index]
        place = _StorageInfo(path.name, 0, path.stat().st_size)
        metadata.storage_data[MetadataIndex(STACK, torch.Size([0, 0, 0]))] = place
    _mark(path)
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS}
    (source / "config.json").write_text(json.dumps(config))
    return source


def _mark(path: Path) -> None:
    """Give the first and the last number of each expert a value of its own."""
    with zipfile.ZipFile(path) as archive:
        member = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    assert member.file_size == EXPERTS * STEP
    with path.open("r+b") as file:
        file.seek(member.header_offset + 26)
        begin = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        for expert in range(EXPERTS):
            for place, value in ((expert * STEP, expert + 1), ((expert + 1) * STEP - 4, expert + 101)):
                file.seek(begin + place)
                file.write(bytes([value]) * 4)
    assert path.stat().st_blocks * 512 < 100 * MIB


def test_chunk_larger_than_the_budget(large: Path, destination: Path) -> None:
    done = run(large, destination)
    assert done.returncode == 0, done.stderr
    peak, written = json.loads(done.stdout)
    assert written > EXPERTS * STEP > 1_500_000_000
    assert peak <= 256 * MIB
    assert _ends(destination) == {
        f"model.layers.0.mlp.experts.{e}.down_proj.weight": (bytes([e + 1]) * 4, bytes([e + 101]) * 4)
        for e in range(EXPERTS)
    }


def _ends(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """First and last four bytes of every expert in the merged files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            for name, entry in header.items():
                if "experts" not in name:
                    continue
                first, last = entry["data_offsets"]
                file.seek(start + first)
                head = file.read(4)
                file.seek(start + last - 4)
                found[name] = (head, file.read(4))
    return found


def _bomb(folder: Path, key: str, size: int) -> None:
    """Replace an item by a zstd stream of zeros."""
    with edited_metadata(folder) as metadata:
        index = chunk_of(metadata, key)
        info = metadata.storage_data[index]
        path = folder / info.relative_path
        packed = zstandard.ZstdCompressor(level=1).compressobj()
        block = bytes(16 * MIB)
        with path.open("ab") as file:
            offset = file.tell()
            for _ in range(size // len(block)):
                file.write(packed.compress(block))
            file.write(packed.flush())
            length = file.tell() - offset
        place = replace(info, offset=offset, length=length, transform_descriptors=["stream.zstd/1"])
        metadata.storage_data[index] = place


@pytest.mark.parametrize("gib", [1, 4])
def test_zstd_bomb(gib: int, small: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small item that inflates to gigabytes is refused with little memory and disk."""
    folder = save(small, tmp_path / "ckpt")
    _bomb(folder, "model.norm.weight", gib << 30)
    assert (folder / "__0_0.distcp").stat().st_size < MIB
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    done = run(folder, tmp_path / "out", limit=768 * MIB, dtype="keep")
    assert UnsafeError.__name__ in done.stderr
    assert "model.norm.weight" in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "temporary").iterdir())
