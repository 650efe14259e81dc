"""The tile form's checks and its autograd, as far as they need no GPU: operands that are refused, which programs the
gradients run, and that they are not differentiated again.

Programs are not launched here, but named: a launch is what `bind` returns. Values are in test_mix_tile.py and
test_mix_grad_tile.py, on a GPU.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.dispatch import Program
from rollforward.kernels.errors import BackendError, DeviceError, DtypeError, ShapeError
from rollforward.kernels.mhc import mix_grad_sweep, mix_sweep
from rollforward.kernels.mhc.mix import mhc_across, mhc_enter, mhc_head, mhc_post

D, SETTINGS = 512, {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}


@pytest.fixture(autouse=True)
def _tile_form(monkeypatch):
    monkeypatch.setattr(dispatch, "is_tile", lambda op: op == "mix")


def operands(count: int = 3) -> dict[str, Tensor]:
    return {
        "sublayer_TD": torch.zeros(count, D, dtype=torch.bfloat16),
        "streams_TMD": torch.zeros(count, 4, D, dtype=torch.bfloat16),
        "post_TM": torch.ones(count, 4),
        "comb_TMM": torch.ones(count, 4, 4),
        "fn_XJ": torch.zeros(24, 4 * D),
        "base_X": torch.zeros(24),
        "scale_3": torch.ones(3),
        "norm_D": torch.ones(D),
    }


def head_operands() -> dict[str, Tensor]:
    streams = operands()["streams_TMD"]
    return {"streams_TMD": streams, "fn_MJ": torch.zeros(4, 4 * D), "base_M": torch.zeros(4), "scale_1": torch.ones(1)}


def call(op: str, given: dict[str, Tensor]) -> object:
    if op == "mhc_head":
        return mhc_head(**given, eps=1e-6, norm_eps=1e-6)
    taken = list(given.values())
    if op == "mhc_post":
        return mhc_post(*taken[:4])
    return mhc_enter(taken[1], *taken[4:], **SETTINGS) if op == "mhc_enter" else mhc_across(*taken, **SETTINGS)


NUMBERS = {
    "mhc_enter": ("fn_XJ", "base_X", "scale_3", "norm_D"),
    "mhc_across": ("post_TM", "comb_TMM", "fn_XJ", "base_X", "scale_3", "norm_D"),
    "mhc_post": ("post_TM", "comb_TMM"),
    "mhc_head": ("fn_MJ", "base_M", "scale_1"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in NUMBERS.items() for name in names])
def test_mixing_numbers_are_float32(op, name, dtype):
    """The programs read them as such, whatever they are."""
    given = head_operands() if op == "mhc_head" else operands()
    given[name] = given[name].to(dtype)
    with pytest.raises(DtypeError, match=f"{op}: {name} is {str(dtype)[6:]}; the op takes float32"):
        call(op, given)


@pytest.mark.parametrize("op", ["mhc_across", "mhc_post"])
def test_a_sublayers_output_is_bfloat16_or_float32(op):
    given = operands() | {"sublayer_TD": torch.zeros(3, D, dtype=torch.float64)}
    with pytest.raises(DtypeError, match=f"{op}: sublayer_TD is float64"):
        call(op, given)


@pytest.mark.parametrize("op", NUMBERS)
def test_streams_are_four_of_bfloat16_on_a_gpu(op):
    given = head_operands() if op == "mhc_head" else operands()
    with pytest.raises(DeviceError, match=f"{op}: streams_TMD is on cpu"):
        call(op, given)
    with pytest.raises(DtypeError, match=f"{op}: streams_TMD is float32"):
        call(op, given | {"streams_TMD": given["streams_TMD"].float()})
    narrow = {name: one[..., : one.shape[-1] // 2] if one.shape[-1] >= D else one for name, one in given.items()}
    with pytest.raises(ShapeError, match="must be a multiple of 256, at least 512"):
        call(op, narrow)


class _OnGpu:
    """As much of a tensor as is looked at."""

    is_cuda = True

    def __init__(self, number: int) -> None:
        self.device = torch.device("cuda", number)


@pytest.mark.parametrize(("other", "place"), [(torch.empty(1), "cpu"), (_OnGpu(0), "cuda:0")])
def test_all_lie_on_the_streams_gpu(other, place):
    streams = _OnGpu(1)
    mix_sweep.check_device("op", streams, base_X=_OnGpu(1))
    with pytest.raises(DeviceError, match=f"op: fn_XJ is on {place} and streams_TMD on cuda:1"):
        mix_sweep.check_device("op", streams, base_X=_OnGpu(1), fn_XJ=other)


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[str]]:
    """The names of the gradients' programs, in the order in which they would run."""
    names: list[str] = []

    def bound(wanted: Program) -> Callable[..., None]:
        return lambda *_: names.append(wanted.function)

    caches = mix_grad_sweep._launch, mix_grad_sweep._of_width
    monkeypatch.setattr(mix_grad_sweep, "bind", bound)
    for one in caches:
        one.cache_clear()
    yield names
    for one in caches:
        one.cache_clear()


class _Context:
    """What autograd gives a backward pass."""

    def __init__(self, needs: str, names: str, saved: tuple[Tensor | None, ...]) -> None:
        self.needs_input_grad = tuple(one in needs.split() for one in (*names.split(), "settings"))
        self.saved_tensors, self.settings = saved, (20, 1e-6, 1e-6)


@pytest.fixture
def _as_in_a_backward_pass() -> Iterator[None]:
    with torch.no_grad():
        yield


ROWS, PARAMETERS = ["gates_backward", "streams_backward"], ["parameter_sums"]


@pytest.mark.usefixtures("_as_in_a_backward_pass")
@pytest.mark.parametrize(
    ("needs", "programs"),
    [
        ("streams fn base scale norm", ROWS + PARAMETERS),
        ("streams", ROWS),
        ("streams norm", ROWS + PARAMETERS),
        ("base", ROWS + PARAMETERS),
    ],
)
def test_a_way_in_runs_the_programs_of_the_gradients_asked_for(launched, needs, programs):
    x, weights = torch.zeros(3, 4 * D, dtype=torch.bfloat16), torch.zeros(3, 32)
    numbers = tuple(list(operands().values())[4:])
    context = _Context(needs, "streams fn base scale norm", (x, *numbers, weights, weights))
    grads = mix_sweep.Enter.backward(context, x[:, :D], weights)
    assert launched == programs
    assert len(grads) == 6
    assert [one is not None for one in grads[1:5]] == [programs[-1:] == PARAMETERS] * 4


@pytest.mark.usefixtures("_as_in_a_backward_pass")
@pytest.mark.parametrize(
    ("needs", "programs"),
    [
        ("f streams post comb fn base scale norm", [*ROWS, "weight_sums", *PARAMETERS]),
        ("f streams post comb", [*ROWS, "weight_sums"]),
        ("f comb", [*ROWS, "weight_sums"]),
        ("f streams", ROWS),
        ("f scale", ROWS + PARAMETERS),
    ],
)
def test_a_way_across_runs_the_programs_of_the_gradients_asked_for(launched, needs, programs):
    x, weights = torch.zeros(3, 4 * D, dtype=torch.bfloat16), torch.zeros(3, 32)
    numbers = tuple(list(operands().values())[4:])
    saved = x[:, :D], x, weights, x, *numbers, weights, weights
    context = _Context(needs, "f streams post comb fn base scale norm", saved)
    grads = mix_sweep.Across.backward(context, x.view(3, 4, D), x[:, :D], weights)
    assert launched == programs
    assert len(grads) == 9
    has_mixing, has_parameters = "weight_sums" in programs, programs[-1:] == PARAMETERS
    assert [one is not None for one in grads[2:8]] == [has_mixing] * 2 + [has_parameters] * 4


@pytest.mark.parametrize("function", ["Enter", "Across", "Leave"])
def test_gradients_are_not_differentiated_again(function):
    """With no tokens, for which there are no launches."""
    given = {name: one.requires_grad_() for name, one in operands(0).items()}
    f, streams, post, comb, *numbers = given.values()
    settings = 20, 1e-6, 1e-6
    out = {
        "Enter": lambda: mix_sweep.Enter.apply(streams, *numbers, settings)[0],
        "Across": lambda: mix_sweep.Across.apply(f, streams, post, comb, *numbers, settings)[0],
        "Leave": lambda: mix_sweep.Leave.apply(f, streams, post, comb),
    }[function]()
    with pytest.raises(BackendError, match="mix runs as tile, which has no gradients of gradients"):
        torch.autograd.grad(out.sum(), streams, create_graph=True, retain_graph=True)
    (grad,) = torch.autograd.grad(out.sum(), streams)
    assert grad.shape == streams.shape


class _Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_launches_on_one_stream_share_what_their_blocks_tell_each_other(monkeypatch):
    current = [_Stream(1)]
    monkeypatch.setattr(mix_sweep, "_multiprocessors", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mix_sweep._exchange_of_stream.cache_clear()

    def places(count: int, width: int = 4096) -> tuple[int, ...]:
        return tuple(one.data_ptr() for one in mix_sweep.shared_exchange(count, width, torch.device("cpu")))

    try:
        assert places(1) == places(8192) == places(40)
        assert len({places(1), places(1, 512)}) == 2
        first = places(1)
        current[0] = _Stream(2)
        assert not set(places(1)) & set(first)
        for count in (1, 16, 17, 8192):
            shared = mix_sweep.shared_exchange(count, 4096, torch.device("cpu"))
            alone = mix_sweep.exchange(count, 4096, torch.device("cpu"))
            assert [one.shape for one in shared] == [one.shape for one in alone]
            assert all(one.is_contiguous() for one in shared)
            assert not any(one.any() for one in shared)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not set(places(1)) & set(first)
        kept = mix_sweep.shared_exchange(1, 4096, torch.device("cpu"))
        assert kept.sums.data_ptr() not in places(1)
    finally:
        mix_sweep._exchange_of_stream.cache_clear()
