"""Seeded orders that need no state: where an element stands in epoch e is a function of (key, e, position).

Used by the prompt source and by the conversations of SFT. A cursor is then two integers and a resumed run continues at
any position without replaying the ones before it.
"""

import hashlib

_MASK_64 = (1 << 64) - 1


def derive_key(*parts: str | int) -> int:
    """A 64-bit key from names and numbers; the same in every process and on every machine, different for every tuple of
    parts.
    """
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


class Permutation:
    """A pseudo-random bijection of 0 ... size-1, evaluated one element at a time.

    Four Feistel rounds over the smallest even number of bits that holds `size`, repeated until the result is in range
    (fewer than four walks on average).

    Args:
        size: number of elements, at least 1.
        key: 64-bit key; another key gives another order.
    """

    def __init__(self, size: int, key: int) -> None:
        """Derive the keys of the rounds."""
        if size < 1:
            raise ValueError(f"the size of a permutation is {size}; it must be at least 1.")
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = tuple(derive_key("round", key, index) for index in range(4))

    def __call__(self, index: int) -> int:
        """The element at position `index`, which must be in 0 ... size-1."""
        if not 0 <= index < self._size:
            raise IndexError(f"position {index} is outside 0 ... {self._size - 1}")
        value = self._rounds(index)
        while value >= self._size:
            value = self._rounds(value)
        return value

    def _rounds(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """Spread every bit of a 64-bit integer over all others (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK_64
    return value ^ value >> 31
