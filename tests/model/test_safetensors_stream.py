"""Proves: files written tensor by tensor are the bytes that the safetensors library writes, and a file that lies about
itself is a typed error. Does not prove what is in a checkpoint (test_checkpoint.py).
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollforward.model import safetensors_stream
from rollforward.model.errors import CheckpointError
from rollforward.model.safetensors_stream import MAX_HEADER_BYTES, ShardFile, TensorReader, read_header
from rollforward.model.shapes import StoredDtype, StoredTensor

_LIBRARY_DTYPE = {**safetensors_stream.TORCH_DTYPE, "F8_E8M0": torch.float8_e8m0fnu}


def _random_tensors(seed: int) -> dict[str, tuple[StoredDtype, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, tuple[StoredDtype, torch.Tensor]] = {}
    dtypes: tuple[StoredDtype, ...] = ("I8", "F8_E4M3", "F8_E8M0", "BF16", "F32", "I64")
    for index in range(1, 30):
        dtype = dtypes[index % 6]
        shape = ((index % 5 + 1, index), (index,), (2, 1, index))[index % 3]
        size = torch.Size(shape).numel() * _LIBRARY_DTYPE[dtype].itemsize
        raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        tensors[f"layers.{index * 7 % 11}.w{index}"] = (dtype, raw.view(_LIBRARY_DTYPE[dtype]).view(shape))
    return tensors


@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_the_librarys(tmp_path: Path, seed: int) -> None:
    tensors = _random_tensors(seed)
    save_file({name: tensor for name, (_, tensor) in tensors.items()}, tmp_path / "library", metadata={"format": "pt"})
    stored = [
        StoredTensor(name=name, shape=tuple(tensor.shape), dtype=dtype) for name, (dtype, tensor) in tensors.items()
    ]
    shard = ShardFile(tmp_path / "ours", stored)
    for name, (_, tensor) in reversed(tensors.items()):  # in any order, and in pieces
        raw = tensor.reshape(-1).view(torch.uint8)
        assert not shard.is_full
        shard.write(name, raw[len(raw) // 2 :], len(raw) // 2)
        shard.write(name, raw[: len(raw) // 2])
    assert shard.is_full
    shard.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    entries = read_header(tmp_path / "library")
    with TensorReader() as reader:
        for name, (dtype, tensor) in tensors.items():
            assert entries[name].dtype == dtype
            found = reader.read(entries[name])
            assert torch.equal(found.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            assert found.shape == tensor.shape


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.float32).view(2, 3)
    shard = ShardFile(tmp_path / "one", [StoredTensor(name="é", shape=(2, 3), dtype="F32")])
    shard.write("é", value.T.contiguous().T)  # not contiguous
    shard.close()
    assert torch.equal(load_file(tmp_path / "one")["é"], value)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        ShardFile(tmp_path / "one", [StoredTensor(name="a", shape=(1,), dtype="F32")])
    assert (tmp_path / "one").read_bytes() == b"precious"


def _file(path: Path, header: Any, data: bytes, *, raw: bytes | None = None, length: int | None = None) -> Path:
    encoded = json.dumps(header).encode() if raw is None else raw
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def _entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "I8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "num_bytes", "message"),
    [
        ({"a": _entry(0, 4), "b": _entry(2, 6)}, 6, "b lies in bytes 2 to 6 of the data and overlaps"),
        ({"a": _entry(0, 4), "b": _entry(0, 4)}, 4, "b lies in bytes 0 to 4 of the data and overlaps"),
        ({"a": _entry(0, 4), "b": _entry(5, 6)}, 6, "leaves a hole before it"),
        ({"a": _entry(1, 4)}, 4, "leaves a hole before it"),
        ({"a": _entry(0, 4)}, 5, "describes 4 bytes of data, the file has 5"),
        ({"a": _entry(0, 4)}, 3, "describes 4 bytes of data, the file has 3"),
        ({"a": _entry(0, 4, [5])}, 4, "a has 4 bytes, and is I8"),
        ({"a": _entry(0, 4, [1], "I64")}, 4, "a has 4 bytes, and is I64"),
        ({"a": _entry(0, 4, [2**40, 2**40])}, 4, "a has 4 bytes"),
        ({"a": _entry(4, 0, [4])}, 4, "lies in bytes 4 to 0"),
        ({"a": {**_entry(0, 4), "data_offsets": [-4, 0]}}, 4, "damaged"),
        ({"a": {**_entry(0, 4), "data_offsets": [0, 4, 4]}}, 4, "damaged"),
        ({"a": {**_entry(0, 4), "data_offsets": [0, 2**63]}}, 4, "damaged"),
        ({"a": {**_entry(0, 4), "data_offsets": [0, 10**40]}}, 4, "damaged"),
        ({"a": {**_entry(0, 4), "shape": [-4]}}, 4, "damaged"),
        ({"a": {**_entry(0, 4), "shape": [4.0]}}, 4, "damaged"),
        ({"a": {**_entry(0, 4), "extra": 1}}, 4, "damaged"),
        ({"a": 3}, 4, "damaged"),
        ([], 0, "damaged"),
        (None, 0, "damaged"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, num_bytes: int, message: str) -> None:
    file = _file(tmp_path / "f", header, b"\1" * num_bytes)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


def test_a_name_that_stands_twice_has_left_a_hole(tmp_path: Path) -> None:
    entry = json.dumps(_entry(0, 2)), json.dumps(_entry(2, 4))
    file = _file(tmp_path / "f", None, b"1234", raw=f'{{"a": {entry[0]}, "a": {entry[1]}}}'.encode())
    with pytest.raises(CheckpointError, match="leaves a hole"):
        read_header(file)
    file = _file(tmp_path / "g", None, b"1234", raw=f'{{"a": {entry[1]}, "a": {entry[0]}}}'.encode())
    with pytest.raises(CheckpointError, match="describes 2 bytes"):
        read_header(file)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1, 3])
def test_a_header_of_absurd_length_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(_file(tmp_path / "f", {"a": _entry(0, 4)}, b"1234", length=length))


def test_a_sparse_file_may_not_claim_a_header_beyond_the_limit(tmp_path: Path) -> None:
    file = _file(tmp_path / "f", {}, b"", length=MAX_HEADER_BYTES + 1)
    os.truncate(file, MAX_HEADER_BYTES * 3)
    with pytest.raises(CheckpointError, match=f"at most {MAX_HEADER_BYTES}"):
        read_header(file)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(_file(tmp_path / "f", None, b"", raw=b'{"a":' + b"[" * 200_000))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes: to open it would wait for ever
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "folder", "nowhere", "loop", "absent"):
        with pytest.raises(CheckpointError, match=f"{name} is damaged or absent"):
            read_header(tmp_path / name)


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    """Model caches keep the files elsewhere and link them into a folder for each revision."""
    (tmp_path / "blobs").mkdir()
    file = _file(tmp_path / "blobs" / "f", {"a": _entry(0, 4)}, b"1234")
    (tmp_path / "link").symlink_to(file)
    with TensorReader() as reader:
        assert reader.read(read_header(tmp_path / "link")["a"]).tolist() == [49, 50, 51, 52]


def test_a_file_that_is_cut_off_after_its_header_was_read_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    file = _file(tmp_path / "f", {"a": _entry(0, 8192), "b": _entry(8192, 16384)}, bytes(16384))
    entries = read_header(file)
    with TensorReader() as reader:
        reader.read(entries["b"])
        os.truncate(file, 10_000)
        assert reader.read(entries["a"]).tolist() == [0] * 8192
        with pytest.raises(CheckpointError, match=r"b cannot be read .* the file ends at byte 10000"):
            reader.read(entries["b"])


def test_a_file_that_is_removed_is_read_to_the_end(tmp_path: Path) -> None:
    file = _file(tmp_path / "f", {"a": _entry(0, 4), "b": _entry(4, 8)}, b"12345678")
    entries = read_header(file)
    with TensorReader() as reader:
        reader.read(entries["a"])
        file.unlink()
        assert reader.read(entries["b"]).tolist() == [53, 54, 55, 56]
