"""Proves: `rollforward kernels warm` knows each model's programs, and says what it does not take."""

import pytest

from rollforward.conf.errors import UsageError
from rollforward.model.kernels_verb import main, programs
from rollforward.model.presets import PRESETS


@pytest.mark.parametrize("model", PRESETS)
def test_every_model_has_programs_of_its_sizes(model):
    width, inner = PRESETS[model]["hidden_size"], PRESETS[model]["moe_intermediate_size"]
    wanted = programs(model, "flash")
    for one in wanted:
        constants = dict(one.constants)
        assert constants.get("V", PRESETS[model]["vocab_size"]) == PRESETS[model]["vocab_size"]
        assert constants.get("D", 4096) in (width, 4096)
        assert {constants.get("R", inner), constants.get("K", width)} == {inner, width}
    kinds = {one.module for one in wanted}
    assert ("mhc.mix_tile" in kinds) == ("quant.mxfp4_tile" in kinds) == (model != "tiny")


@pytest.mark.parametrize(
    "words",
    [[], ["warm"], ["cool", "model=flash"], ["warm", "model=other"], ["warm", "model=flash", "x=1"], ["warm", "flash"],
     ["warm", "model=flash", "jobs=0"], ["warm", "model=flash", "teacher=x"]],
)  # fmt: skip
def test_other_words_are_refused(words):
    with pytest.raises(UsageError, match=r"kernels is followed by .*; it takes: warm model="):
        main(words)
