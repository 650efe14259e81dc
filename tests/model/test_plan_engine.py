"""Proves what plan says of an engine: against the tensors that engines really hold, against published totals, and that
the largest load which it names fits and the next one does not."""

import msgspec
import pytest

from rollforward.kernels.quant.mxfp4 import mxfp4_to_fp8
from rollforward.model.config import preset
from rollforward.model.errors import ConfigError
from rollforward.model.plan_config import EngineShape, WeightForm
from rollforward.model.plan_engine import fewest_gpus, make_engine_plan, weight_bytes
from rollforward.model.plan_model import make_plan
from rollforward.model.precision import pack_published
from rollforward.model.shapes import param_specs
from rollforward.rollout.engine.forward import ForwardRunner
from tests.helpers.tiny import random_params


def test_weights_of_an_engine_are_as_many_bytes_as_planned() -> None:
    """On tiny: published bytes, their values in a real engine, and experts expanded by the kernel."""
    config = preset("tiny")
    masters = random_params(config)
    packed = {spec.name: pack_published(spec, masters[spec.name]) for spec in param_specs(config)}
    assert weight_bytes(config, "native").total == sum(one.num_bytes for one in packed.values())
    runner = ForwardRunner(config, "native")
    runner.load(packed.items())
    assert weight_bytes(config, "fp32").total == sum(value.nbytes for value in runner.values.values())
    expanded = 0
    for one in packed.values():
        if one.format == "mxfp4":
            assert one.scale is not None
            expanded += sum(
                part.nbytes
                for expert in range(config.n_routed_experts)
                for part in mxfp4_to_fp8(one.data[expert], one.scale[expert])[:2]
            )
        else:
            expanded += one.num_bytes
    assert weight_bytes(config, "fp8").total == expanded


@pytest.mark.parametrize("name", ["flash", "pro", "mini", "tiny"])
def test_native_weights_are_the_checkpoint(name: str) -> None:
    config = preset(name)  # pyright: ignore[reportArgumentType]
    assert weight_bytes(config, "native").total == make_plan(config).num_bytes


@pytest.mark.parametrize(("form", "with_mtp", "trunk"), [("native", 150.6, 147.2), ("fp8", 283.5, 277.0)])
def test_flash_experts_are_the_published_sizes(form: WeightForm, with_mtp: float, trunk: float) -> None:
    experts = 256 * weight_bytes(preset("flash"), form).one_expert / 1e9
    assert experts == pytest.approx(with_mtp, abs=0.05)
    assert experts * 43 / 44 == pytest.approx(trunk, abs=0.05)


def test_experts_are_divided_whole_and_sequences_too() -> None:
    config = preset("tiny")
    one, three = (make_engine_plan(config, EngineShape(gpus=gpus, sequences=10, context=33)) for gpus in (1, 3))
    assert one.weight_bytes == make_plan(config).num_bytes
    assert one.weight_bytes - three.weight_bytes == (8 - 3) * three.weights.one_expert
    assert (one.sequences_on_a_gpu, three.sequences_on_a_gpu) == (10, 4)
    assert three.cache_bytes == 4 * (three.cache.per_sequence + 2 * three.cache.padded_block)
    assert three.total == three.weight_bytes + three.cache_bytes


@pytest.mark.parametrize("gpus", [1, 3, 8])
@pytest.mark.parametrize("weights", ["native", "fp8", "fp32"])
def test_the_largest_load_fits_and_the_next_does_not(gpus: int, weights: WeightForm) -> None:
    config = preset("mini")
    shape = EngineShape(gpus=gpus, weights=weights, sequences=100, context=5000)
    plan = make_engine_plan(config, shape)
    room = plan.total + 123_456_789
    block = plan.cache.block_tokens

    def total(**changed: int) -> int:
        return make_engine_plan(config, msgspec.structs.replace(shape, **changed)).total

    context = plan.longest_context(room)
    assert context > 5000
    assert total(context=context) <= room < total(context=context + block)
    sequences = plan.most_sequences(room)
    assert sequences > 100
    assert total(sequences=sequences) <= room < total(sequences=sequences + 1)
    assert plan.longest_context(plan.weight_bytes) == plan.most_sequences(plan.weight_bytes) == 0
    fewest = fewest_gpus(config, shape, plan.total)
    assert fewest is not None
    assert fewest <= gpus
    assert total(gpus=fewest) <= plan.total
    assert fewest == 1 or total(gpus=fewest - 1) > plan.total
    assert fewest_gpus(config, shape, plan.weights.others) is None


def test_nobody_says_how_long_sequences_are() -> None:
    assert make_engine_plan(preset("tiny"), EngineShape()).context == 2048, "the longest of tiny"
    assert make_engine_plan(preset("flash"), EngineShape()).context == 8192


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (EngineShape(context=2049), "max_position_embeddings are 2,048. Set engine.context=2048 or less"),
        (EngineShape(gpus=9, context=9), "Set engine.gpus=8 or less"),
    ],
)
def test_impossible_engines_are_refused(shape: EngineShape, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_engine_plan(preset("tiny"), shape)
