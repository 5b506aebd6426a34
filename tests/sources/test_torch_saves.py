"""`torch.save` files of every kind: what can be read is read exactly, what cannot is refused by name."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import streammerge
from benchmarks.sharding import fake_rank
from streammerge.errors import SourceError, UnsupportedError
from tests.support import pickles as p
from tests.support.data import DATA
from tests.support.ranks import Cut, Mesh, junk, rank_path, sharded, write_plain, write_ranks
from tests.support.raw import of_torch, read_safetensors
from tests.support.results import catalogued, read_all
from tests.support.zips import archive_of, write_archive, write_bytes, write_state

CASES = DATA / "ptcases"
REFUSED = {"meta": "m", "quantized": "q", "sparse": "s", "complex_conj_neg": "conj"}
EXACT = sorted(path.stem for path in (CASES / "expected").iterdir() if path.stem not in {*REFUSED, "nested_containers"})
AS_TORCH_LOADS = ("alignment4096", "legacy_nonzip", "protocol4", "skip_data")
WEIGHT = junk((4, 3), torch.float32, 1)


def case_folder(case: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copyfile(CASES / "ckpt" / f"{case}.pt", rank_path(folder, 1, 0))
    return folder


@pytest.mark.parametrize("case", EXACT)
def test_cases_with_expected_tensors(case: str, tmp_path: Path) -> None:
    assert read_all(case_folder(case, tmp_path)) == read_safetensors(CASES / "expected" / f"{case}.safetensors")


@pytest.mark.parametrize("case", AS_TORCH_LOADS)
def test_cases_agree_with_torch_load(case: str, tmp_path: Path) -> None:
    loaded = torch.load(CASES / "ckpt" / f"{case}.pt", weights_only=False)
    assert read_all(case_folder(case, tmp_path)) == {name: of_torch(tensor) for name, tensor in loaded.items()}


def test_other_containers_beside_the_weights(tmp_path: Path) -> None:
    loaded = torch.load(CASES / "ckpt" / "nested_containers.pt", weights_only=False)
    catalogue = catalogued(case_folder("nested_containers", tmp_path))
    assert read_all(tmp_path) == {"w": of_torch(_find(loaded, "w"))}
    assert catalogue.warnings or catalogue.skipped


def _find(value: Any, name: str) -> torch.Tensor:
    for key, one in value.items():
        if key == name and isinstance(one, torch.Tensor):
            return one
        if isinstance(one, dict) and (found := _find(one, name)) is not None:
            return found
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(("case", "name"), REFUSED.items())
def test_unreadable_tensors_are_refused_by_name(case: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"\b{name}\b.*model_world_size_1_rank_0\.pt"):
        read_all(case_folder(case, tmp_path))


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_lazy_bits_are_refused(bit: str, tmp_path: Path) -> None:
    lazy = WEIGHT.to(torch.complex64).conj()
    with pytest.raises(UnsupportedError, match=r"blocks\.0"):
        read_all(write_plain(tmp_path, {"blocks.0": lazy if bit == "conj" else lazy.imag}))


def test_complex128_cannot_be_merged(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "ckpt", {"wave": WEIGHT.to(torch.complex128)})
    with pytest.raises(UnsupportedError, match=r"wave.*complex128"):
        streammerge.merge(source, tmp_path / "out", dtype="keep", max_ram="2G", check=False)
    assert not (tmp_path / "out").exists()


_DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def test_every_dtype_plain_and_sharded(tmp_path: Path) -> None:
    tensors = {str(dtype): junk((5, 3), dtype, seed) for seed, dtype in enumerate(_DTYPES)}
    wanted = {name: of_torch(tensor) for name, tensor in tensors.items()}
    assert read_all(write_plain(tmp_path / "plain", tensors)) == wanted
    cuts = dict.fromkeys(tensors, Cut({0: (0,)}))
    assert read_all(write_ranks(tmp_path / "sharded", tensors, Mesh((3,)), cuts)) == wanted


def test_the_top_folder_need_not_match_the_file_name(tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "some other name.pt")
    (tmp_path / "some other name.pt").rename(rank_path(tmp_path, 1, 0))
    assert read_all(tmp_path) == {"w": of_torch(WEIGHT)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol: int, tmp_path: Path) -> None:
    state = {"w": WEIGHT, "note": "x" * 300, "number": 1 << 40}
    assert read_all(write_plain(tmp_path, state, pickle_protocol=protocol)) == {"w": of_torch(WEIGHT)}


def test_legacy_files(tmp_path: Path) -> None:
    shared = junk((40,), torch.bfloat16, 2)
    state = {"a": shared[3:9].reshape(2, 3), "b": shared[10:], "t": WEIGHT.t(), "p": torch.nn.Parameter(WEIGHT)}
    write_plain(tmp_path, state, _use_new_zipfile_serialization=False)
    assert read_all(tmp_path) == {name: of_torch(tensor) for name, tensor in state.items()}


def test_legacy_storage_views_are_not_misread(tmp_path: Path) -> None:
    """Very old files name a view of a storage in the persistent id: the tensor's bytes begin further on."""
    state = {"w": torch.arange(12.0)[:6]}
    path = rank_path(write_plain(tmp_path, state, _use_new_zipfile_serialization=False), 1, 0)
    content = path.read_bytes()
    at = content.index(b"K\x0cN") + 2  # 12 elements, and no view
    view = p.tup(p.text("a view"), p.integer(4), p.integer(6))
    path.write_bytes(content[:at] + view + content[at + 1 :])
    assert torch.load(path)["w"].tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises((SourceError, UnsupportedError)):
        read_all(tmp_path)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    pickle = p.state_dict({"w": p.tensor(p.storage("0", 12), (4, 3), (3, 1))})
    archive = archive_of(pickle, {"0": of_torch(WEIGHT).data})
    assert read_all(write_archive(tmp_path / "little", archive)) == {"w": of_torch(WEIGHT)}
    big = archive.changed("byteorder", data=b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_all(write_archive(tmp_path / "big", big))
    absent = [(name, member) for name, member in archive.members if name != "byteorder"]
    assert read_all(write_archive(tmp_path / "old", type(archive)(absent))) == {"w": of_torch(WEIGHT)}


def test_big_endian_legacy_files_are_refused(tmp_path: Path) -> None:
    path = rank_path(write_plain(tmp_path, {"w": WEIGHT}, _use_new_zipfile_serialization=False), 1, 0)
    content = path.read_bytes()
    at = content.index(b"little_endian")
    true = content.index(b"\x88", at)
    path.write_bytes(content[:true] + b"\x89" + content[true + 1 :])
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_all(tmp_path)


@pytest.mark.parametrize("location", ["cuda:3", "npu:0", "xpu:12", "hpu", "mps"])
def test_the_device_does_not_matter(location: str, tmp_path: Path) -> None:
    place = p.storage("0", 12, location=location)
    write_state(tmp_path, {"w": p.tensor(place, (4, 3), (3, 1))}, {"0": of_torch(WEIGHT).data})
    assert read_all(tmp_path) == {"w": of_torch(WEIGHT)}


def test_zip64_members(tmp_path: Path) -> None:
    """A storage above 4 GiB, left as a hole, before a small one whose header lies beyond 4 GiB."""
    large = torch.empty((1 << 32) + 64, dtype=torch.uint8)
    with torch.serialization.skip_data():
        torch.save({"large": large, "w": WEIGHT}, rank_path(tmp_path, 1, 0))
    del large
    found = catalogued(tmp_path).entries
    assert found["large"].tensor.shape == ((1 << 32) + 64,)
    (fragment,) = found["w"].tensor.fragments
    assert fragment.offset > 1 << 32
    with rank_path(tmp_path, 1, 0).open("rb") as file:
        file.seek(fragment.offset - 64)
        header = file.read(64)
    assert header.endswith(b"Z") or b"data/1" in header


def test_zip64_extras_hold_only_saturated_fields(tmp_path: Path) -> None:
    pickle = p.state_dict({"w": p.tensor(p.storage("0", 12), (4, 3), (3, 1))})
    archive = archive_of(pickle, {"0": of_torch(WEIGHT).data})
    saturated = 0xFFFFFFFF
    sizes = {"packed": saturated, "size": saturated, "extra": struct.pack("<2H2Q", 1, 16, 48, 48)}
    local = {"packed": saturated, "size": saturated}
    both = archive.changed("data/0", central=sizes, local=local)
    assert read_all(write_archive(tmp_path / "sizes", both)) == {"w": of_torch(WEIGHT)}
    header = archive.build().index(b"model/data/0") - 30
    place = {"header": saturated, "extra": struct.pack("<2HQ", 1, 8, header)}
    assert read_all(write_archive(tmp_path / "place", archive.changed("data/0", central=place))) == {
        "w": of_torch(WEIGHT)
    }


class Novelty:
    """A class that no reader knows."""

    def __init__(self) -> None:
        self.setting = {"a": (1, 2.5, None)}


def test_unknown_classes_in_a_spec_do_not_stop_reading(tmp_path: Path) -> None:
    mesh, cut = Mesh((2,)), Cut({0: (0,)})
    for rank in range(2):
        with fake_rank(rank, 2):
            part = sharded(WEIGHT, cut, mesh, mesh.build(), rank)
            part._spec.novelty = Novelty()
            part._spec.mesh.novelty = Novelty()
            torch.save({"w": part}, rank_path(tmp_path, 2, rank))
    catalogue = catalogued(tmp_path)
    assert read_all(tmp_path) == {"w": of_torch(WEIGHT)}
    assert any("Novelty" in warning for warning in catalogue.warnings)


def test_unknown_classes_beside_the_weights(tmp_path: Path) -> None:
    write_plain(tmp_path, {"model": {"w": WEIGHT}, "args": Novelty(), "step": 3})
    assert read_all(tmp_path) == {"w": of_torch(WEIGHT)}


@pytest.mark.parametrize("protocol", [2, 4])
def test_bytes_beside_the_weights(protocol: int, tmp_path: Path) -> None:
    """Protocol 2 spells bytes as a call of `_codecs.encode`: honest files hold it."""
    state = {"model": {"w": WEIGHT}, "rng": b"\x00\xff", "empty": b"", "array": bytearray(b"x")}
    assert read_all(write_plain(tmp_path, state, pickle_protocol=protocol)) == {"w": of_torch(WEIGHT)}


def test_metadata_of_modules_is_ignored(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    assert state._metadata  # type: ignore[attr-defined]
    assert read_all(write_plain(tmp_path, state)) == {name: of_torch(tensor) for name, tensor in state.items()}


def test_values_that_are_no_tensors_are_listed(tmp_path: Path) -> None:
    state = {"w": WEIGHT, "layer._extra_state": torch.ones(2), "step": 7, "name": "x", "table": [1], "none": None}
    catalogue = catalogued(write_plain(tmp_path, state))
    assert set(catalogue.entries) == {"w"}
    assert set(catalogue.skipped) == {"layer._extra_state", "step", "name", "table", "none"}


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04" + b"\0" * 40, b"not a checkpoint" * 99])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"model_world_size_1_rank_0\.pt"):
        read_all(write_bytes(tmp_path, content))
