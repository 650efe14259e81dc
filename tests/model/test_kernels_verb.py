"""Proves: `rollforward kernels warm` knows each model's programs, and says what it does not take."""

import pytest

from rollforward.conf.errors import UsageError
from rollforward.model.kernels_verb import main, programs
from rollforward.model.presets import PRESETS


@pytest.mark.parametrize("model", PRESETS)
def test_every_model_has_programs_of_its_sizes(model):
    for one in programs(model, "flash"):
        assert dict(one.constants)["V"] == PRESETS[model]["vocab_size"]
        assert dict(one.constants).get("D", 4096) in (PRESETS[model]["hidden_size"], 4096)


@pytest.mark.parametrize(
    "words",
    [[], ["warm"], ["cool", "model=flash"], ["warm", "model=other"], ["warm", "model=flash", "x=1"], ["warm", "flash"],
     ["warm", "model=flash", "jobs=0"], ["warm", "model=flash", "teacher=x"]],
)  # fmt: skip
def test_other_words_are_refused(words):
    with pytest.raises(UsageError, match=r"kernels is followed by .*; it takes: warm model="):
        main(words)
