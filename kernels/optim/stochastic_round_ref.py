"""Stochastic rounding to BF16 by the integer method, with a counter-based generator, in plain torch.

FP32 is BF16 with 16 more bits. Adding a uniform 16-bit number to the bits and cutting the lower 16 off carries with
probability (lower bits) / 2^16: exactly the distance to the neighbour nearer to zero, in units of the gap. The sign is
a bit of its own, so both signs behave alike; denormals need no case of their own.

The generator: elements 2i and 2i + 1 take the lower and the upper half of mix(mix(i + k0) ^ k1) mod 2^32, where the
words k0, k1 are a BLAKE2b digest of the key. mix is the 32-bit finaliser of hash-prospector (x ^= x >> 16; x *=
0x21f0aaad; x ^= x >> 15; x *= 0x735a2d97; x ^= x >> 15), chosen because its factors are below 2^31: a product with 32
bits fits a signed 64-bit integer. Two rounds with a word of the key before each, so that no two keys run through the
same sequence from different places.
"""

import hashlib

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 33
"""Two elements for each 32-bit counter."""

CHUNK = 1 << 16
"""Elements at a time, even: what they need lies in a core's cache."""

_WORD = 0xFFFFFFFF
_HALVES = 0x0000FFFF_0000FFFF
_MAGNITUDE = 0x7FFFFFFF
_LARGEST = 0x7F7FFFFF
"""Largest finite FP32, as bits; cut off, it is the largest finite BF16."""
_INFINITY = 0x7F800000
_QUIET = 0x00400000


def key_words(key: tuple[int, ...]) -> tuple[int, int]:
    """Return the two 32-bit words of a key: the digest of its decimal numbers with commas between."""
    digest = hashlib.blake2b(",".join(str(int(part)) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _mix(x: Tensor, spare: Tensor) -> None:
    """Scramble 32-bit numbers in int64 in place; ``spare`` is overwritten."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=spare))
        x.mul_(factor).bitwise_and_(_WORD)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=spare))


def random_bits_ref(words: tuple[int, int], start: int, count: int, device: torch.device) -> Tensor:
    """Return the 16-bit numbers of elements start to start + count, start even; [count] int32."""
    first, end = start // 2, (start + count + 1) // 2
    counter = torch.arange(first, end, dtype=torch.int64, device=device)
    spare = torch.empty_like(counter)
    counter.add_(words[0]).bitwise_and_(_WORD)
    _mix(counter, spare)
    counter.bitwise_xor_(words[1])
    _mix(counter, spare)
    # Both halves of an int64 that is then read as two int32: the lower one comes first in memory.
    counter.bitwise_or_(torch.bitwise_left_shift(counter, 16, out=spare)).bitwise_and_(_HALVES)
    return counter.view(torch.int32)[:count]


def _round_chunk(x: Tensor, random: Tensor, out: Tensor) -> None:
    """Write x, rounded with ``random``, to ``out``; random is overwritten."""
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    # No carry beyond the largest finite number, and none in infinity and NaN.
    room = torch.clamp(_LARGEST - magnitude, min=0)
    torch.minimum(random, room, out=random)
    random.add_(bits)
    # A NaN whose payload is in the lower bits alone would become an infinity: set the first bit of its payload. The
    # difference is negative for NaN only.
    random.bitwise_or_((_INFINITY - magnitude).bitwise_right_shift_(31).bitwise_and_(_QUIET))
    out.view(torch.int16).copy_(random.bitwise_right_shift_(16))


def stochastic_round_bf16_ref(x: Tensor, words: tuple[int, int]) -> Tensor:
    """Round flat float32 to bfloat16, element i with the i-th random number of the words. [N] -> [N]."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    for start in range(0, x.numel(), CHUNK):
        part = x[start : start + CHUNK]
        random = random_bits_ref(words, start, part.numel(), x.device)
        _round_chunk(part, random, out[start : start + CHUNK])
    return out
