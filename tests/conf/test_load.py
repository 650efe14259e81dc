"""Proves: what a user can mistype is answered with key, value, rule and way out; a right configuration decodes exactly.

Schemas and YAML here are local; the shipped ones are in test_every_config_loads.py.
"""

import contextlib
import json
import pickle
from pathlib import Path
from typing import Annotated, Literal

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from rollforward.conf.errors import ConfigError
from rollforward.conf.load import config_groups, decode, load_config, read_yaml, to_yaml, write_resolved


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the schemas below."""


class Grpo(Record, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grpo"):
    group_size: Annotated[int, msgspec.Meta(ge=2)] = 8
    """Members of a group."""
    kl_beta: float = 0.001


class Cispo(Record, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="cispo"):
    clip_high: float = 5.0


class Optim(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: Annotated[float, msgspec.Meta(gt=0)]
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.betas[0] > self.betas[1]:
            raise ValueError(f"optim.betas is {self.betas}; the first is not above the second. Swap them.")


class Part(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    weight: int = 1


class Step(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    algo: Grpo | Cispo
    place: Literal["here", "there"] = "here"
    inside: tuple[Grpo | Cispo, ...] | None = None


class Run(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int
    algo: Grpo | Cispo
    optim: Optim
    precision: Literal["fp32", "native"] = "native"
    parts: tuple[Part, ...] = ()
    model_dir: str = "."
    plan: tuple[Step, ...] = ()
    named: dict[str, Step] = {}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A configuration folder with one root and one group."""
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "grpo.yaml").write_text("type: grpo\n")
    (tmp_path / "algo" / "cispo.yaml").write_text("type: cispo\nclip_high: 4\n")
    (tmp_path / "run.yaml").write_text("defaults:\n  - algo: grpo\n  - _self_\nsteps: 10\noptim:\n  lr: 1e-3\n")
    return tmp_path


def test_defaults_come_from_the_class_and_the_rest_from_yaml(conf: Path) -> None:
    run = load_config(Run, "run", config_dir=conf)
    assert run == Run(steps=10, algo=Grpo(), optim=Optim(lr=1e-3))


def test_an_override_may_set_what_the_yaml_does_not_mention(conf: Path) -> None:
    run = load_config(Run, "run", ["algo.group_size=16", "precision=fp32", "parts=[{name: a}]"], config_dir=conf)
    assert (run.algo, run.precision, run.parts) == (Grpo(group_size=16), "fp32", (Part(name="a"),))


def test_a_group_choice_replaces_the_group(conf: Path) -> None:
    assert load_config(Run, "run", ["algo=cispo"], config_dir=conf).algo == Cispo(clip_high=4.0)


def test_a_layer_lies_between_yaml_and_overrides(conf: Path) -> None:
    layer = {
        "defaults": [{"override /algo": "cispo"}],
        "steps": 20,
        "optim": {"lr": 0.5},
        "model_dir": "${run_dir:first}/model",
    }
    run = load_config(Run, "run", ["optim.lr=0.25"], layer=layer, run_dirs={"first": "a b"}, config_dir=conf)
    assert run == Run(steps=20, algo=Cispo(clip_high=4.0), optim=Optim(lr=0.25), model_dir="a b/model")
    assert load_config(Run, "run", config_dir=conf).steps == 10, "a layer must not outlive its call"


# override -> what the message must contain: key, value, rule, way out
MISTAKES = {
    "algo.grup_size=3": ["algo.grup_size is not a setting", "Did you mean algo.group_size?"],
    "optim.learning_rate=1": ["optim.learning_rate is not a setting", "optim.lr"],
    "stepz=3": ["stepz is not a setting", "Did you mean steps?"],
    "algo.clip_high=3": [
        "algo.clip_high is not a setting",
        "belongs to another choice of algo.type",
        "'~algo.clip_high'",
    ],
    "parts=[{nam: a}]": ["parts[0].nam is not a setting", "parts.0.name"],
    "algo.group_size=1": ["algo.group_size is 1", ">= 2", "default: 8"],
    "algo.group_size=many": ['algo.group_size is "many"', "expected int"],
    "steps=1.5": ["steps is 1.5", "int"],
    "steps=99999999999999999999": ["steps is 99999999999999999999", "within 64 bits"],
    "optim.lr=inf": ["optim.lr is inf", "finite"],
    "optim.betas=[0.1,nan]": ["optim.betas[1] is nan", "finite"],
    "steps=true": ["steps is true", "int"],
    "precision=fp16": ['precision is "fp16"', "It takes fp32 | native"],
    "algo.type=ppo": ['algo.type is "ppo"', "grpo | cispo"],
    "optim.betas=[0.9,0.1]": ["optim.betas is (0.9, 0.1)", "Swap"],
    "parts=[{weight: 1}]": ["parts[0].name is required", "Set parts.0.name=<str>"],
    "parts=[{name: 1}]": ["parts[0].name is 1", "It takes str; it is required."],
    "plan=[{algo: {type: gpo}}]": ['plan[0].algo.type is "gpo"', "Did you mean grpo? It takes grpo | cispo;"],
    "plan=[{algo: {type: grpo, group_size: 1}}]": ["plan[0].algo.group_size is 1", "int >= 2; default: 8"],
    "plan=[{algo: {type: grpo, clip_high: 1}}]": ["plan[0].algo.clip_high is not a setting", "plan[0].algo.group_size"],
    "plan=[{algo: {type: grpo}, place: ther}]": ["Did you mean there? It takes here | there; default: here"],
    "plan=[{algo: {type: grpo}, inside: [{type: x}]}]": ['plan[0].inside[0].type is "x"', "It takes grpo | cispo;"],
    "plan=[{algo: 3}]": ["plan[0].algo is 3", "expected object"],
    "plan=[3]": ["plan[0] is 3", "expected object"],
    "named={a: {algo: {type: grpo}, place: x}}": ['named.a.place is "x"', "It takes here | there; default: here"],
    "algo=gppo": ["algo=gppo", "Did you mean algo=grpo?"],
    "algo=null": ["algo=null: a choice of algo has a name: cispo, grpo", "algo.KEY=VALUE"],
    "algo=5": ["algo=5: a choice of algo has a name: cispo, grpo", "algo.KEY=VALUE"],
    "optim=adamw": ['optim is "adamw"', "Set what is below it: optim.lr"],
    "steps=???": ["steps has no value", "Set steps=VALUE"],
    "steps=1,2": ["'steps=1,2' names several values"],
    "steps=[1": ["'steps=[1' is not an override"],
    "=1": ["names no key"],
    "~optim": ["optim is required", "optim.lr"],
    "model_dir=${run_dir:x}": ["${run_dir:x} names no earlier run"],
    "model_dir=${nothing}": ["${nothing} refers to a key that is not set"],
    "hydra.verbose=true": ["Hydra's own settings"],
    "+task=x": ["task is not a setting"],
}


def test_a_key_inside_a_list_is_advised_as_it_can_be_typed(conf: Path) -> None:
    given = ["parts=[{weight: 1}]", "parts.0.name=a"]
    assert load_config(Run, "run", given, config_dir=conf).parts == (Part(name="a"),)


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_named_with_its_way_out(conf: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, "run", [override], config_dir=conf)
    message = str(caught.value)
    assert [part for part in MISTAKES[override] if part not in message] == [], message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: [", "not valid YAML"),
        (b"a: &x [*x]", "an alias lies in its own anchor"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.yaml .*{message}"):
        read_yaml(tmp_path / "bad.yaml")


def test_every_unknown_key_is_named_at_once(conf: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo\.grup_size[\s\S]*stepz"):
        load_config(Run, "run", ["stepz=1", "algo.grup_size=1"], config_dir=conf)


KEYS = st.sampled_from(
    ["steps", "algo", "algo.type", "algo.group_size", "optim.lr", "optim", "parts", "x", "model_dir", "hydra", "run"]
)
VALUES = st.one_of(st.text("abc123.-+[]{}:,'\"$=~@ \\", max_size=12), st.integers().map(str), st.floats().map(str))


@hypothesis.given(key=KEYS, sign=st.sampled_from(["", "+", "++", "~"]), value=VALUES)
@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_override_decodes_or_is_a_config_error(conf: Path, key: str, sign: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(Run, "run", [f"{sign}{key}={value}"], config_dir=conf), Run)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["steps", "algo", "type", "lr", "optim", "parts", "q"]), inner)
    ),
    max_leaves=8,
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(data=st.dictionaries(st.sampled_from(["steps", "algo", "optim", "parts", "precision", "x"]), JSON))
def test_any_data_decodes_or_is_a_config_error(data: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(decode(Run, data), Run)


def test_the_resolved_configuration_is_written_whole_and_reads_back(conf: Path, tmp_path: Path) -> None:
    run = load_config(Run, "run", ["parts=[{name: a}]"], config_dir=conf)
    write_resolved(run, tmp_path / "out" / "config.json")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert decode(Run, written) == run
    assert written["algo"] == {"type": "grpo", "group_size": 8, "kl_beta": 0.001}
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]
    assert "group_size: 8" in to_yaml(run)


def test_groups_are_the_folders(conf: Path) -> None:
    assert config_groups(conf) == {"algo": ("cispo", "grpo")}
