"""Empty disks of QEMU's format qcow2, and how long their files can be. See QEMU's docs/interop/qcow2.txt."""

import struct
from typing import Final

_MAGIC: Final = 0x5146_49FB
_HEADER: Final = struct.Struct(">IIQIIQIIQQIIQQQQII")
_CLUSTER_BITS: Final = 16
_CLUSTER_BYTES: Final = 1 << _CLUSTER_BITS
_ENTRIES: Final = _CLUSTER_BYTES // 8
MAX_BYTES: Final = _ENTRIES * _ENTRIES * _CLUSTER_BYTES
"""Of a disk: as many as one cluster of tables tells of."""
_REFCOUNT_ORDER: Final = 4
_SPARE_CLUSTERS: Final = 64
_USED_CLUSTERS: Final = 4
"""The header, the table of reference counts, a block of them, and the table of tables of clusters."""


def max_file_bytes(size: int) -> int:
    """The file of a disk of so many bytes is never longer: its clusters, and what tells where they are and how often
    they are used, with some room.
    """
    clusters = -(-size // _CLUSTER_BYTES)
    tables = -(-clusters // _ENTRIES)
    blocks = -(-2 * (clusters + tables) // _CLUSTER_BYTES) + 2
    return (clusters + tables + blocks + _SPARE_CLUSTERS) * _CLUSTER_BYTES


def empty_disk(size: int) -> bytes:
    """The file of a disk of so many bytes that nothing was written to.

    Args:
        size: a multiple of 512, at most `MAX_BYTES`.
    """
    num_tables = -(-size // (_CLUSTER_BYTES * _ENTRIES))
    if size % 512 or not 0 < size <= MAX_BYTES:
        raise ValueError(f"a disk of {size} bytes: it must be a multiple of 512, and at most {MAX_BYTES}")
    refcounts, block, tables = (number * _CLUSTER_BYTES for number in range(1, _USED_CLUSTERS))
    fields = (_MAGIC, 3, 0, 0, _CLUSTER_BITS, size, 0, num_tables, tables, refcounts, 1, 0, 0, 0, 0, 0)
    header = _HEADER.pack(*fields, _REFCOUNT_ORDER, _HEADER.size)
    clusters = (header, struct.pack(">Q", block), struct.pack(">H", 1) * _USED_CLUSTERS, b"")
    return b"".join(cluster.ljust(_CLUSTER_BYTES, b"\0") for cluster in clusters)
