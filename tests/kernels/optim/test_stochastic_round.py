"""Proves: only the two neighbours come out, with the right probabilities; no bias over elements or over keys; random
numbers that are uniform and uncorrelated; special values; and that bits depend on key and index alone.

Statistical bounds are at six or more standard deviations, and seeds are fixed: a failure is a fault.
"""

import hashlib
import itertools
import math
import struct

import pytest
import torch
from torch import Tensor

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.optim.stochastic_round import stochastic_round_bf16
from rollforward.kernels.optim.stochastic_round_ref import CHUNK, MAX_ELEMENTS, key_words, random_bits_ref
from tests.helpers.bits import torch_threads

CPU = torch.device("cpu")
SIGMAS = 6


def plain_random(key: tuple[int, ...], index: int) -> int:
    """One 16-bit random number in plain integers of unbounded size."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = x * 0x735A2D97 % 2**32
        return x ^ (x >> 15)

    value = mix(mix((index // 2 + first) % 2**32) ^ second)
    return value >> 16 if index % 2 else value & 0xFFFF


def plain_round(value: float, random: int) -> float:
    """The magnitude's bits plus the random number, cut off; finite values."""
    (bits,) = struct.unpack("<I", struct.pack("<f", abs(value)))
    rounded = min(bits + random, 0x7F7FFFFF) & 0xFFFF0000
    return math.copysign(struct.unpack("<f", struct.pack("<I", rounded))[0], value)


def as_bits(rounded: Tensor) -> Tensor:
    assert rounded.dtype == torch.bfloat16
    return rounded.view(torch.int16)


def from_bits(*bits: int) -> Tensor:
    """float32 of these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 values nearer to and farther from zero, as float64; equal where x is exact."""
    bits = x.view(torch.int32)
    near = bits & ~0xFFFF
    far = torch.where(bits == near, near, near + 0x10000)
    return near.view(torch.float32).double(), far.view(torch.float32).double()


def random_bits(key: tuple[int, ...], count: int) -> Tensor:
    return random_bits_ref(key_words(key), 0, count, CPU).to(torch.int64)


def z_of_bits(bits_K: Tensor) -> Tensor:
    """Deviations of each of 16 bits from one half, in standard deviations. [K] -> [16]."""
    ones = torch.stack([(bits_K >> bit & 1).sum() for bit in range(16)]).double()
    return (ones - len(bits_K) / 2) / math.sqrt(len(bits_K) / 4)


def z_of_chi_square(cells: Tensor, num_cells: int) -> float:
    counts = torch.bincount(cells, minlength=num_cells).double()
    expected = len(cells) / num_cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1))


def test_random_numbers_against_plain_integers() -> None:
    for key in ((), (0,), (1, 2, 3, 4), (2**63, 5), (-7, 10**30)):
        count = 3 * CHUNK + 5
        got = torch.cat(
            [random_bits_ref(key_words(key), s, min(CHUNK, count - s), CPU) for s in range(0, count, CHUNK)]
        )
        assert len(got) == count
        for index in (0, 1, 2, 3, 1001, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3, count - 1):
            assert int(got[index]) == plain_random(key, index)
    far = MAX_ELEMENTS - 6
    got = random_bits_ref(key_words((9,)), far, 6, CPU)
    assert got.tolist() == [plain_random((9,), far + i) for i in range(6)]


def test_rounded_values_against_plain_integers() -> None:
    x = torch.randn(2 * CHUNK + 77) * 10 ** torch.randint(-40, 38, (2 * CHUNK + 77,))
    rounded = stochastic_round_bf16(x, key=(3, 1, 4)).double()
    for index in [*range(300), *range(CHUNK - 50, CHUNK + 50), *range(2 * CHUNK - 3, 2 * CHUNK + 77)]:
        assert float(rounded[index]) == plain_round(float(x[index]), plain_random((3, 1, 4), index))


def test_the_bits_are_nailed_down() -> None:
    # A stored run continues with the same numbers on another version and another machine.
    assert random_bits((11, 0, 5), 6).tolist() == [30710, 61352, 4218, 11228, 50609, 30746]


def test_by_hand() -> None:
    # 1 + 2^-9 is a quarter of the way from 1 to 1 + 2^-7: up for random numbers from 3/4 of 2^16.
    x = torch.full((4000,), 1 + 2.0**-9)
    rounded = stochastic_round_bf16(x, key=(1,)).float()
    up = random_bits((1,), 4000) >= 0xC000
    assert torch.equal(rounded, torch.where(up, 1 + 2.0**-7, 1.0))
    assert abs(int(up.sum()) - 1000) < SIGMAS * math.sqrt(4000 * 3 / 16)


@pytest.mark.parametrize("upper", [0x3F80, 0x4049, 0x3FFF, 0x0000, 0x0001, 0x007F, 0x0080, 0x7F7E, 0x2B11])
@pytest.mark.parametrize("lower", [1, 0x0100, 0x4000, 0x8000, 0xC001, 0xFFFF])
def test_probability_is_the_distance(upper: int, lower: int) -> None:
    # Powers of two, a mantissa of ones (the neighbour is in the next binade), denormals, the top.
    count = 1 << 16
    chance = lower / 65536
    for sign in (0, 0x8000):
        x = from_bits((sign | upper) << 16 | lower).expand(count)
        near, far = neighbours(x.contiguous())
        rounded = stochastic_round_bf16(x, key=(upper, lower, sign)).double()
        went_far = rounded == far
        assert torch.equal(went_far, rounded != near)
        deviation = abs(int(went_far.sum()) - count * chance)
        assert deviation <= SIGMAS * math.sqrt(count * chance * (1 - chance)) + 5


@pytest.mark.parametrize("spread", ["normal", "uniform", "wide", "denormal"])
def test_no_bias_over_elements(spread: str) -> None:
    count = 1 << 20
    x = {
        "normal": torch.randn(count),
        "uniform": torch.rand(count),
        "wide": torch.randn(count) * 2.0 ** torch.randint(-120, 120, (count,)),
        "denormal": torch.randn(count) * 2.0**-130,
    }[spread]
    near, far = neighbours(x)
    gap = torch.where(far == near, 1.0, (far - near).abs())
    error = (stochastic_round_bf16(x, key=(7,)).double() - x.double()) / gap
    assert error.abs().max() < 1
    assert abs(float(error.mean())) < 3 / math.sqrt(count)  # the bar is 10; one standard deviation is 0.41
    assert abs(float((error * x.sign()).mean())) < 3 / math.sqrt(count)  # neither towards zero nor away
    assert abs(float(error.square().mean()) - 1 / 6) < 0.02 or spread == "denormal"


def test_no_bias_over_keys() -> None:
    num_keys, x = 4096, torch.randn(257)
    near, far = neighbours(x)
    total = sum((stochastic_round_bf16(x, key=(5, micro, 9)).double() for micro in range(num_keys)), torch.zeros(257))
    error = (total / num_keys - x.double()) / (far - near).abs()
    assert error.abs().max() < 0.5 * SIGMAS / math.sqrt(num_keys)
    assert abs(float(error.mean())) < 3 / math.sqrt(num_keys * 257)


def test_sixteen_uniform_bits_over_elements_and_over_keys() -> None:
    assert z_of_bits(random_bits((1, 2), 1 << 22)).abs().max() < SIGMAS
    for part in (0, 1, 3):  # which number of the key counts up
        keys = [tuple(step if place == part else 4 for place in range(4)) for step in range(20_000)]
        numbers = torch.stack([random_bits(key, 2) for key in keys])
        assert z_of_bits(numbers[:, 0]).abs().max() < SIGMAS
        assert z_of_bits(numbers[:, 1]).abs().max() < SIGMAS
        # Neighbouring keys at one element, bit by bit, and the upper bytes jointly.
        assert z_of_bits(numbers[1:, 0] ^ numbers[:-1, 0]).abs().max() < SIGMAS
        assert abs(z_of_chi_square((numbers[1:, 0] >> 12 << 4) | (numbers[:-1, 0] >> 12), 256)) < SIGMAS


@pytest.mark.parametrize("start", [0, 1 << 20, (1 << 32) - (1 << 20)])
def test_numbers_are_equidistributed(start: int) -> None:
    numbers = random_bits_ref(key_words((start,)), start, 1 << 22, CPU).to(torch.int64)
    assert abs(z_of_chi_square(numbers, 1 << 16)) < SIGMAS
    assert abs(float(numbers.double().mean()) - 32767.5) < SIGMAS * 65536 / math.sqrt(12 * len(numbers))


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 16, 64, 1024, 4096, 65536])
def test_elements_are_uncorrelated(distance: int) -> None:
    numbers = random_bits((8, 8), (1 << 21) + distance)
    one, other = numbers[:-distance], numbers[distance:]
    assert z_of_bits(one ^ other).abs().max() < SIGMAS
    assert abs(z_of_chi_square((one >> 8 << 8) | (other >> 8), 1 << 16)) < SIGMAS
    # Every pair of bits, also across: 256 correlations.
    signs = torch.stack([(numbers >> bit & 1) * 2 - 1 for bit in range(16)]).float()
    products = signs[:, :-distance] @ signs[:, distance:].t()
    assert products.abs().max() < SIGMAS * math.sqrt(len(one))


def test_keys_are_uncorrelated_element_by_element() -> None:
    count = 1 << 20
    keys = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1), (1, 2), (12, 3), (1, 23), (0, 1, 2, 3), (-1, 2, 3)]
    numbers = [random_bits(key, count) for key in keys]
    for one, other in itertools.combinations(numbers, 2):
        assert z_of_bits(one ^ other).abs().max() < SIGMAS
        assert abs(z_of_chi_square((one >> 8 << 8) | (other >> 8), 1 << 16)) < SIGMAS
        centred = (one.double() - 32767.5) * (other.double() - 32767.5)
        assert abs(float(centred.mean())) < SIGMAS * (65536**2 / 12) / math.sqrt(count)


def test_no_key_runs_through_the_sequence_of_another() -> None:
    # Were the key only added to the counter, or only xored into it, another key's sequence would be the same numbers at
    # shifted or permuted places.
    streams = [set(pairs_of((seed,))) for seed in range(40)]
    repeats = sum(len(one & other) for one, other in itertools.combinations(streams, 2))
    expected = 780 * 4096**2 / 2**32
    assert repeats < expected + SIGMAS * math.sqrt(expected)


def pairs_of(key: tuple[int, ...]) -> list[int]:
    numbers = random_bits(key, 8192).view(-1, 2)
    return (numbers[:, 1] << 16 | numbers[:, 0]).tolist()


def test_exact_values_are_unchanged_all_of_them() -> None:
    every = torch.arange(1 << 16, dtype=torch.int64)
    x = (every << 16).to(torch.int32).view(torch.float32)
    rounded = as_bits(stochastic_round_bf16(x, key=(1,))).to(torch.int64) & 0xFFFF
    is_nan = x.isnan()
    assert torch.equal(rounded[~is_nan], every[~is_nan])  # with both zeros and both infinities
    assert stochastic_round_bf16(x, key=(1,))[is_nan].isnan().all()


def test_nan_stays_nan_whatever_its_payload() -> None:
    patterns = [0x7F800001, 0x7F80FFFF, 0x7F810000, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF]
    for pattern, sign in itertools.product(patterns, (0, 1 << 31)):
        x = from_bits(sign | pattern).expand(4096)
        rounded = stochastic_round_bf16(x, key=(pattern,))
        assert rounded.isnan().all()
        assert torch.equal(as_bits(rounded) < 0, torch.full((4096,), bool(sign)))


def test_finite_stays_finite_at_the_top() -> None:
    largest = torch.finfo(torch.bfloat16).max
    for lower, sign in itertools.product((1, 0x7FFF, 0x8000, 0xFFFF), (1, -1)):
        x = sign * from_bits(0x7F7F0000 | lower).expand(4096)
        assert (stochastic_round_bf16(x, key=(lower,)).double() == sign * largest).all()
    # One gap below, rounding is as everywhere.
    below = stochastic_round_bf16(from_bits(0x7F7E8000).expand(4096), key=(2,)).double()
    assert sorted(set(below.tolist())) == [float(from_bits(0x7F7E0000)), largest]


def test_signs_are_alike() -> None:
    x = torch.randn(10_001)
    assert torch.equal(stochastic_round_bf16(-x, key=(4,)), -stochastic_round_bf16(x, key=(4,)))


def test_bits_depend_on_key_and_index_alone() -> None:
    x = torch.randn(300, 701)
    whole = as_bits(stochastic_round_bf16(x, key=(1, 2)))
    flat = as_bits(stochastic_round_bf16(x.view(-1), key=(1, 2)))
    assert torch.equal(flat.view(300, 701), whole)
    assert torch.equal(as_bits(stochastic_round_bf16(x.t().contiguous().t(), key=(1, 2))), whole)
    padded = torch.full((300, 705), float("nan"))
    padded[:, 2:703] = x
    assert torch.equal(as_bits(stochastic_round_bf16(padded[:, 2:703], key=(1, 2))), whole)
    for stop in (0, 1, 2, 64, CHUNK - 1, CHUNK, CHUNK + 1):
        assert torch.equal(as_bits(stochastic_round_bf16(x.view(-1)[:stop], key=(1, 2))), flat[:stop])
    with torch_threads(2):
        assert torch.equal(as_bits(stochastic_round_bf16(x, key=(1, 2))), whole)
    assert not torch.equal(as_bits(stochastic_round_bf16(x, key=(2, 1))), whole)


def test_rounding_the_matrices_of_a_tensor_is_the_same_on_any_distribution() -> None:
    # Each owner rounds whole matrices under their own keys, so who owns them and in what order is not in the bits.
    experts = torch.randn(6, 24, 40)
    alone = [stochastic_round_bf16(expert, key=(0, 3, 1, index)) for index, expert in enumerate(experts)]
    for owners in ([[0, 1, 2], [3, 4, 5]], [[5], [4, 3], [2, 1, 0]]):
        for share in owners:
            buffer = torch.cat([experts[index].view(-1) for index in share])
            for place, index in enumerate(share):
                part = buffer[place * 960 : (place + 1) * 960]
                rounded = stochastic_round_bf16(part, key=(0, 3, 1, index))
                assert torch.equal(as_bits(rounded).view(24, 40), as_bits(alone[index]))


def test_the_input_is_left_alone_and_nothing_is_recorded() -> None:
    x = torch.randn(99, requires_grad=True)
    before = x.detach().clone()
    rounded = stochastic_round_bf16(x, key=(1,))
    assert not rounded.requires_grad
    assert torch.equal(x, before)
    assert stochastic_round_bf16(torch.tensor(1.5), key=(1,)).shape == ()
    assert stochastic_round_bf16(torch.zeros(0, 4), key=(1,)).shape == (0, 4)


def test_what_is_refused() -> None:
    with pytest.raises(DtypeError, match="x is float64"):
        stochastic_round_bf16(torch.zeros(3, dtype=torch.float64), key=(1,))
    with pytest.raises(ShapeError, match="Round its parts under keys of their own"):
        stochastic_round_bf16(torch.zeros(1).expand(MAX_ELEMENTS + 1), key=(1,))
