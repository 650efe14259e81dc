"""Proves: a learner rank that leaves one tensor of the plan out of its published format stops the run before step 1,
named with rank, format and both numbers."""

from collections import Counter

import pytest

from rollforward.model.config import preset
from rollforward.model.shapes import tensor_specs
from rollforward.rl.errors import QuantisationError
from rollforward.rl.quantised import check_quantised, planned_quantised

TINY = preset("tiny")


def test_the_plan_counts_official_tensors_one_for_each_experts_matrix() -> None:
    planned = planned_quantised(TINY, "native")
    blocks = TINY.num_hidden_layers + TINY.num_nextn_predict_layers
    assert planned["mxfp4"] == blocks * TINY.n_routed_experts * 3
    assert planned["fp8"] == sum(spec.format == "fp8" for spec in tensor_specs(TINY))
    assert sorted(planned) == ["bf16", "fp8", "mxfp4"]
    assert planned_quantised(TINY, "fp32") == {"mxfp4": 0, "fp8": 0, "bf16": 0}


def test_reports_that_fit_pass_whatever_they_say_of_exact_formats() -> None:
    counts = Counter(spec.format for spec in tensor_specs(TINY))
    check_quantised([counts, {**counts, "fp32": 0}], TINY, "native")
    check_quantised([{}], TINY, "fp32")


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "bf16"])
def test_one_tensor_less_on_one_rank_is_named(name: str) -> None:
    planned = planned_quantised(TINY, "native")
    short = {**planned, name: planned[name] - 1}
    message = (
        rf"^rank 2 takes {planned[name] - 1} tensors through {name}, planned are {planned[name]} \(precision native"
    )
    with pytest.raises(QuantisationError, match=message):
        check_quantised([planned, planned, short, planned], TINY, "native")
    with pytest.raises(QuantisationError, match=rf"rank 0 takes 1 tensors through {name}, planned are 0"):
        check_quantised([{name: 1}], TINY, "fp32")


def test_a_rank_that_reports_nothing_is_caught_in_every_format() -> None:
    with pytest.raises(
        QuantisationError, match=r"rank 0 takes 0 .* mxfp4.*rank 0 takes 0 .* fp8.*rank 0 takes 0 .* bf16"
    ):
        check_quantised([{}], TINY, "native")
