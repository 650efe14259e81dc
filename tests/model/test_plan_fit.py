"""Proves that plan refuses what does not fit on the given GPUs, and that what it names instead fits."""

import gc
import json
import re
import weakref
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.conf import cli
from rollforward.model.config import PresetName, preset
from rollforward.model.errors import ConfigError
from rollforward.model.plan import FullPlan, PlanRun, main, make_full_plan
from rollforward.model.plan_config import EngineShape
from rollforward.model.plan_fit import refusal
from rollforward.model.plan_learner import layer_input_bytes, learner_elements, make_learner_plan, undivided_bytes
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.transformer import Transformer
from rollforward.model.weights import build_weights
from tests.helpers.tiny import random_params, random_tokens


def _changed(run: PlanRun, settings: str) -> PlanRun:
    """The run with `key=number ...` set, as the command line does."""
    fields: dict[str, Any] = {}
    for key, number in re.findall(r"([\w.]+)=(\d+)", settings):
        first, _, rest = key.partition(".")
        fields[first] = msgspec.structs.replace(getattr(run, first), **{rest: int(number)}) if rest else int(number)
    return msgspec.structs.replace(run, **fields)


def _failing(plan: FullPlan) -> dict[str, str]:
    return {check.part: check.way_out for check in plan.checks if not check.fits}


TIGHT = {
    "cache": PlanRun(
        model="mini", nodes=1, gpus_per_node=4, gpu_bytes=60 * 10**9, engine=EngineShape(sequences=9999, context=99999)
    ),
    "experts": PlanRun(
        model="mini", nodes=2, shared=False, gpu_bytes=40 * 10**9, learner_ranks=1, engine=EngineShape(sequences=60000)
    ),
    "micro-batch": PlanRun(model="mini", nodes=1, gpus_per_node=1, gpu_bytes=60 * 10**9, micro_batch_tokens=200_000),
    "ranks": PlanRun(model="mini", nodes=1, gpus_per_node=1, gpu_bytes=38 * 10**9),
    "ranks apart": PlanRun(model="mini", nodes=1, gpus_per_node=2, gpu_bytes=38 * 10**9, shared=False),
    "both": PlanRun(model="mini", nodes=1, gpu_bytes=40 * 10**9, engine=EngineShape(sequences=1000, context=30000)),
}
"""Plans that do not fit by a little, each for another reason."""


@pytest.mark.parametrize("reason", TIGHT)
def test_each_way_out_fits(reason: str) -> None:
    run = TIGHT[reason]
    failing = _failing(make_full_plan(run))
    assert failing
    for part, told in failing.items():
        settings = re.fullmatch(r"Set (.*)\.", told)
        assert settings is not None, told
        for way in settings[1].split(", or "):
            changed = _failing(make_full_plan(_changed(run, way)))
            assert part not in changed, f"{way} for {part} of {reason}: {changed}"


def test_reasons_name_what_they_are_about() -> None:
    told = {reason: _failing(make_full_plan(run)) for reason, run in TIGHT.items()}
    assert list(told["cache"]) == ["engine"]
    assert re.search("engine.gpus=.*engine.context=.*engine.sequences=", told["cache"]["engine"])
    assert "micro_batch_tokens=" in told["micro-batch"]["learner"]
    assert told["ranks"]["learner"] == "Set learner_ranks=2 nodes=2."
    assert told["ranks apart"]["learner"] == "Set learner_ranks=2 nodes=2.", "a replica needs a GPU of its own"
    assert list(told["both"]) == ["learner and engine"]


@pytest.mark.parametrize(("name", "nodes", "with_experts"), [("flash", 8, 4096), ("pro", 32, None)])
def test_the_released_models_are_refused_and_why(name: PresetName, nodes: int, with_experts: int | None) -> None:
    """Whatever the ranks, values and gradients are whole on each."""
    run = PlanRun(model=name, nodes=nodes)
    plan = make_full_plan(run)
    told = refusal(plan.checks)
    assert told is not None
    assert f"learner: the fullest GPU needs {plan.learner.total:,} bytes and has 126,900,000,000 usable." in told
    assert f"No number of ranks fits: {undivided_bytes(plan.learner):,} bytes are on every rank" in told
    assert (f"it would fit on {with_experts:,} such GPUs" in told) if with_experts else ("routed experts" not in told)
    assert "of every tensor divided it would fit on" in told
    assert "rollforward cannot do that yet" in told
    assert "model=mini fits here" in told
    assert plan.checks[1].part == "engine"
    gpus = {"flash": 2, "pro": 9}[name]
    assert plan.checks[1].way_out == f"Set engine.gpus={gpus}."


def test_mini_fits_on_one_gpu_with_its_engine() -> None:
    plan = make_full_plan(PlanRun(model="mini", nodes=1, gpus_per_node=1))
    assert [(check.part, check.fits) for check in plan.checks] == [
        ("learner", True),
        ("engine", True),
        ("learner and engine", True),
    ]
    learner, engine, both = plan.checks
    assert both.need == learner.need + engine.need == plan.learner.total + plan.engine.total
    assert refusal(plan.checks) is None
    assert 1e9 < plan.model.num_parameters < 2e9


def test_without_machines_nothing_is_refused() -> None:
    assert make_full_plan(PlanRun(model="flash", gpu_bytes=1)).checks == ()


def test_apart_memory_does_not_add_up() -> None:
    run = PlanRun(model="mini", nodes=1, shared=False)
    plan = make_full_plan(run)
    assert [check.part for check in plan.checks] == ["learner", "engine"]
    assert (run.num_ranks, run.num_engine_gpus, run.num_replicas) == (4, 4, 4)


@pytest.mark.parametrize(
    ("settings", "ranks", "replicas"),
    [
        ({}, 1, 1),
        ({"zero_size": 4}, 4, 1),
        ({"nodes": 3}, 16, 24),
        ({"nodes": 3, "shared": False}, 8, 16),
        ({"nodes": 1, "learner_ranks": 2, "shared": False, "engine": EngineShape(gpus=4)}, 2, 1),
        ({"nodes": 1, "engine": EngineShape(gpus=3)}, 8, 2),
    ],
)
def test_gpus_become_ranks_and_replicas(settings: dict[str, Any], ranks: int, replicas: int) -> None:
    run = PlanRun(model="tiny", **settings)
    assert (run.num_ranks, run.num_replicas) == (ranks, replicas)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"nodes": 1, "learner_ranks": 16}, "are 8 GPUs.*Set learner_ranks=8 or nodes=2"),
        ({"nodes": 1, "engine": EngineShape(gpus=9)}, "leaves 8 of 8 GPUs"),
        ({"nodes": 1, "learner_ranks": 8, "shared": False}, "engine.gpus is 1; the learner leaves 0 of 8"),
        ({"nodes": 1, "gpus_per_node": 1, "shared": False}, "leaves 0 of 1"),
    ],
)
def test_more_than_there_are_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PlanRun(model="tiny", **settings)


def test_the_zero_group_is_the_largest_whose_padding_is_allowed() -> None:
    """mini's largest matrix is a sixteenth of its dense ones: 32 ranks would be half empty."""
    learner = make_learner_plan(preset("mini"), PlanRun(model="mini", learner_ranks=64))
    assert (learner.zero_size, learner.num_ranks) == (16, 64)
    with pytest.raises(ConfigError, match="Set zero_size=16"):
        make_learner_plan(preset("mini"), PlanRun(model="mini", learner_ranks=64, zero_size=32))


def test_what_no_number_of_ranks_divides_is_less_than_any_rank_holds() -> None:
    plans = [make_learner_plan(preset("mini"), PlanRun(model="mini", learner_ranks=ranks)) for ranks in (1, 8, 64)]
    least = [undivided_bytes(plan) for plan in plans]
    assert max(least) - min(least) < 64 * 16, "padding of AdamW's parameters to ranks is all that differs"
    assert all(bound < plan.total for bound, plan in zip(least, plans, strict=True))
    assert plans[2].total - least[2] < 0.02 * plans[2].total


def test_dividing_by_one_rank_divides_nothing() -> None:
    """What is left out is sums of experts by rank (FP32 once instead of FP32 and BF16), and padding of AdamW's."""
    config = preset("tiny")
    memory = make_learner_plan(config, PlanRun(model="tiny")).memory
    elements = learner_elements(config, PlanRun(model="tiny").split)
    divided = elements.divided(1, "experts")
    assert memory.total - memory.expert_sums // 6 * 2 - divided in range(4 * 4 * 2 * 2)
    ranks = [elements.divided(ranks, "experts") for ranks in (1, 2, 4)]
    everything = [elements.divided(ranks, "everything") for ranks in (2, 4, 8)]
    assert sorted(ranks, reverse=True) == ranks
    assert sorted(everything, reverse=True) == everything
    assert everything[0] < ranks[1]


def test_inputs_of_layers_are_what_recompute_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a forward with recompute, what entered each layer is alive, and as large as planned."""
    config, num_tokens = preset("tiny"), 40
    values = {name: one.requires_grad_(one.is_floating_point()) for name, one in random_params(config).items()}
    transformer = Transformer(config, "native", recompute=True)
    inputs: list[weakref.ref[Tensor]] = []
    block = Transformer._block

    def seen(self: Transformer, *arguments: Any) -> Tensor:
        inputs.append(weakref.ref(arguments[1]))
        return block(self, *arguments)

    monkeypatch.setattr(Transformer, "_block", seen)
    batch = SegmentBatch([Segment(start=0, length=num_tokens)], window=config.sliding_window)
    streams_TMD = transformer.streams(build_weights(config, values), random_tokens(config, (num_tokens,)), batch)
    gc.collect()
    alive = [one for ref in inputs if (one := ref()) is not None]
    assert len(alive) == config.num_hidden_layers
    assert sum(one.nbytes for one in alive) == layer_input_bytes(config, num_tokens)
    assert all(one.dtype == torch.float32 for one in alive)
    assert streams_TMD.requires_grad


def test_the_plan_is_written_before_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model=mini", "nodes=1", "gpu_bytes=30000000000"]) == 2
    out, err = capfd.readouterr()
    assert "memory of the fullest rank" in out
    assert re.search(r"learner +24,[\d,]+  fits", out) or "does not fit" in out
    assert err.startswith("error: ")


def test_a_plan_that_fits_exits_with_0(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model=tiny", "nodes=1", "gpus_per_node=1", "engine.context=2048"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert out.count("  fits\n") == 3
    assert "1 GPU of 141,000,000,000 bytes, 90% usable: 126,900,000,000\n" in out
    assert "  not yet: an engine on a GPU" in out


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    run = PlanRun(model="mini", nodes=1, gpu_bytes=30 * 10**9, engine=EngineShape(gpus=2), json=True)
    with pytest.raises(ConfigError, match="learner"):
        main(run)
    told = json.loads(capsys.readouterr().out)
    plan = make_full_plan(run)
    assert told["settings"]["engine"]["gpus"] == 2
    assert told["model"]["num_bytes"] == 1_438_704_984
    assert told["model"]["cache"]["per_token"] == plan.model.cache.per_token
    assert told["learner"]["memory"]["total"] == plan.learner.memory.total
    assert told["learner"]["total"] == plan.learner.total == told["checks"][0]["need"]
    assert told["learner"]["dense"]["padding_share"] == plan.learner.dense.padding_share
    assert told["engine"]["weight_bytes"] == plan.engine.weight_bytes
    assert told["sync"]["total_s"] == plan.sync.total_s
    assert told["log"]["total_per_token"] == plan.log.total_per_token
    assert told["hidden"]["bytes_per_token"] == 2048
    assert [check["fits"] for check in told["checks"]] == [check.fits for check in plan.checks]
    assert told["fits"] is False
    assert len(told["not_yet"]) == 2
