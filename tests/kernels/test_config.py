"""Proves: every op with a tile form has a key, no other has, and what no machine could run is refused with key, value,
rule and way out, by the rules that the programs themselves have."""

import msgspec
import pytest
import torch

from rollforward.kernels import dispatch
from rollforward.kernels.config import KernelBackends, check_no_teachers, check_precision, check_sizes
from rollforward.kernels.errors import BackendError, ShapeError
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.model.config import preset
from rollforward.model.presets import PRESETS

FITS = {"vocab_size": 129280, "hidden_size": 1024, "expert_width": 512}


def test_every_op_with_a_tile_form_has_a_key_and_is_a_reference_by_default() -> None:
    assert KernelBackends.__struct_fields__ == tuple(sorted(dispatch.TILE_OPS))
    assert set(msgspec.structs.asdict(KernelBackends()).values()) == {dispatch.REFERENCE}
    assert KernelBackends().tiles == ()
    assert KernelBackends(mix="tile", reverse_kl="tile").tiles == ("mix", "reverse_kl")


@pytest.mark.parametrize("given", [{"mix": "cuda"}, {"sinkhorn": "tile"}, {"mix": None}])
def test_another_form_or_op_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, KernelBackends)


@pytest.mark.parametrize("name", KernelBackends.__struct_fields__)
def test_tile_forms_need_native_precision(name: str) -> None:
    kernels = msgspec.convert({name: "tile"}, KernelBackends)
    check_precision(kernels, "native")
    with pytest.raises(
        BackendError,
        match=rf"kernels\.{name} is tile and precision is fp32; .* Set precision=native, or kernels\.{name}=",
    ):
        check_precision(kernels, "fp32")
    check_precision(KernelBackends(), "fp32")


def _refusal(name: str, **sizes: int) -> str | None:
    try:
        check_sizes(msgspec.convert({name: "tile"}, KernelBackends), "the model in X", **(FITS | sizes))
    except BackendError as error:
        return str(error)
    return None


def test_sizes_are_those_that_there_are_programs_for() -> None:
    for width in (128, 256, 384, 512, 640, 768, 1024, 4096, 4224, 7168):
        assert (_refusal("mix", hidden_size=width) is None) == mix_sweep.takes(width), width
        for inner in (64, 128, 512, 576):
            refused = _refusal("mxfp4", hidden_size=width, expert_width=inner)
            assert (refused is None) == (mxfp4_sweep.takes(inner, width) and mxfp4_sweep.takes(width, inner))
    assert _refusal("mxfp4", hidden_size=1000) is not None


def test_a_refusal_of_a_size_says_which_and_what_to_do() -> None:
    assert _refusal("mix", num_streams=2) == (
        "kernels.mix is tile, and the model in X has hidden_size 1024 and hc_mult 2; its programs are for 4 streams"
        " whose width is a multiple of 256, 512 at least. Set kernels.mix=reference"
    )
    found = _refusal("mxfp4", expert_width=64)
    assert found is not None
    assert "hidden_size 1024 and moe_intermediate_size 64" in found


@pytest.mark.parametrize("name", ["linear_logprob", "reverse_kl"])
def test_vocabulary_losses_take_the_widths_that_their_programs_take(name: str) -> None:
    found = _refusal(name, hidden_size=1020)
    assert found is not None
    assert f"Set kernels.{name}=reference" in found
    found = _refusal(name, vocab_size=129283)
    assert found is not None
    assert "vocab_size 129283 and hidden_size 1024; its programs are for multiples of 8" in found
    for vocabulary, width in ((129280, 1016), (1000, 1024), (1004, 1024), (1000, 1020)):
        refused = _refusal(name, vocab_size=vocabulary, hidden_size=width)
        assert (refused is None) == vocab_sweep.takes(vocabulary, width)
    assert vocab_sweep.takes(1000, 1016)
    vocab_sweep.check_operands("op", hidden_TD=torch.zeros(3, 16), teacher_head_VE=torch.zeros(1000, 16))
    with pytest.raises(ShapeError, match=r"teacher_head_VE\.shape\[0\] is 1004; it must be a multiple of 8"):
        vocab_sweep.check_operands("op", hidden_TD=torch.zeros(3, 16), teacher_head_VE=torch.zeros(1004, 16))


def test_a_run_without_teachers_has_no_reverse_kl() -> None:
    check_no_teachers(KernelBackends(linear_logprob="tile", mix="tile", mxfp4="tile"), "sft")
    with pytest.raises(
        BackendError, match=r"kernels\.reverse_kl is tile, and sft has no teachers.* Leave kernels\.rev"
    ):
        check_no_teachers(KernelBackends(reverse_kl="tile"), "sft")


def test_presets_for_a_gpu_fit_and_tiny_does_not() -> None:
    for name in PRESETS:
        config = preset(name)
        sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
        sizes |= {"expert_width": config.moe_intermediate_size}
        refused = [op for op in dispatch.TILE_OPS if _refusal(op, num_streams=config.hc_mult, **sizes)]
        assert refused == (["mix", "mxfp4"] if name == "tiny" else [])
