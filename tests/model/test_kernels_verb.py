"""Proves: `rollforward kernels warm` knows each model's programs, and says what it does not take."""

import json

import msgspec
import pytest

from rollforward.conf.errors import UsageError
from rollforward.kernels import dispatch
from rollforward.kernels.loss import vocab_sweep
from rollforward.model.config import config_json, preset
from rollforward.model.kernels_verb import main, programs
from rollforward.model.presets import PRESETS


@pytest.mark.parametrize("model", PRESETS)
def test_every_model_has_programs_of_its_sizes(model):
    width, inner = PRESETS[model]["hidden_size"], PRESETS[model]["moe_intermediate_size"]
    wanted = programs(preset(model), preset("flash"))
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


def test_a_model_directory_has_programs_of_its_own_vocabulary(tmp_path, monkeypatch):
    config = msgspec.structs.replace(preset("mini"), vocab_size=776)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    asked = []
    monkeypatch.setattr(dispatch, "warm", lambda wanted, jobs: (asked.extend(wanted), (len(asked), 0))[1])
    assert main(["warm", f"model={tmp_path}", "teacher=flash", "jobs=1"]) == 0
    assert {dict(one.constants)["V"] for one in asked if one.module == "loss.vocab_tile"} == {776}
    assert {dict(one.constants)["D"] for one in asked if one.function == "logits"} == {1024, 4096}


def test_a_student_is_its_own_teacher_too():
    mini, flash = preset("mini"), preset("flash")
    wanted = programs(mini, flash)
    assert len(set(wanted)) == len(wanted)
    for teacher in (mini, flash):
        assert set(vocab_sweep.programs(mini.vocab_size, mini.hidden_size, teacher.hidden_size)) <= set(wanted)


def test_sizes_without_programs_are_left_out():
    odd = msgspec.structs.replace(preset("mini"), vocab_size=777)
    assert {one.module.partition(".")[0] for one in programs(odd, odd)} == {"mhc", "quant"}
