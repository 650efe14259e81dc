"""Proves: help says of every setting whose it is: what choices share once, what they differ in with its choice."""

from typing import Annotated

import msgspec
import pytest

from rollforward.conf import cli
from rollforward.conf.errors import ConfigError
from rollforward.conf.jobs import plan_jobs
from rollforward.conf.schema import Field, element_fields, field_at, schema_fields


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rounds: int = 4
    """Rounds."""


class Shared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int = 8
    """Size."""
    beta: float = 0.0
    """Beta."""
    inner: Inner | None = None
    """Inner or null."""
    last: int = 1


class Plain(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="plain"):
    pass


class Sharp(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="sharp"):
    beta: float = 0.5
    inner: Inner | None = Inner()
    edge: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Edge."""


class Soft(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="soft"):
    edge: float = 0.1
    """Another edge."""


class Exact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="exact"):
    case: bool = False


class Code(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="code"):
    file: str


class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="made"):
    name: str


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="read"):
    name: str
    reward: Exact | Code


class Root(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int = 1
    algo: Plain | Sharp | Soft = Plain()
    tasks: list[Made | Read] = []


def _lines(fields: list[Field]) -> list[tuple[str, str, str]]:
    return [(field.path, field.default, field.choices_text) for field in fields]


def test_common_settings_come_once_and_differing_ones_together_with_their_choices() -> None:
    assert _lines(list(schema_fields(Root))) == [
        ("steps", "1", ""),
        ("algo.type", "plain", ""),
        ("algo.size", "8", ""),
        ("algo.last", "1", ""),
        ("algo.beta", "0.0", "type=plain | soft"),
        ("algo.beta", "0.5", "type=sharp"),
        ("algo.inner", "null", "type=plain | soft"),
        ("algo.inner", '{"rounds":4}', "type=sharp"),
        ("algo.inner.rounds", "4", ""),
        ("algo.edge", "3", "type=sharp"),
        ("algo.edge", "0.1", "type=soft"),
        ("tasks", "[]", ""),
    ]


def test_a_choice_inside_a_choice_names_both() -> None:
    assert _lines(list(element_fields(Root))) == [
        ("tasks[].type", "required", ""),
        ("tasks[].name", "required", ""),
        ("tasks[].reward.type", "required", "type=read"),
        ("tasks[].reward.case", "false", "type=read, reward.type=exact"),
        ("tasks[].reward.file", "required", "type=read, reward.type=code"),
    ]


@pytest.mark.parametrize(
    ("kind", "path", "default"),
    [
        ("plain", "algo.beta", "0.0"),
        ("sharp", "algo.beta", "0.5"),
        ("soft", "algo.edge", "0.1"),
        ("sharp", "algo.edge", "3"),
        ("plain", "algo.edge", None),
        ("plain", "algo.size", "8"),
        ("plain", "algo.sizes", None),
    ],
)
def test_a_setting_is_found_under_the_choice_that_was_made(kind: str, path: str, default: str | None) -> None:
    found = field_at(Root, {"algo": {"type": kind}}, tuple(path.split(".")))
    assert (found.default if found else None) == default
    assert field_at(Root, {}, ("algo", "edge")) is None


def test_an_error_names_the_default_of_the_chosen_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"algo\.kl_beta is -1; .* default: 0\.0\.$"):
        plan_jobs("train", ["recipe=tiny", "algo=gspo", "algo.kl_beta=-1"])
    with pytest.raises(ConfigError, match=r"default: 0\.001\.$"):
        plan_jobs("train", ["recipe=tiny", "algo.kl_beta=-1"])


def test_no_two_lines_of_help_are_of_one_setting_without_saying_whose(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        assert cli.main([verb, "--help"]) == 0
        lines = [
            line.split("=", 1) for line in capsys.readouterr().out.splitlines() if line[:3].strip() and "=" in line
        ]
        keys = [key.strip() for key, _ in lines]
        for key, rest in lines:
            assert keys.count(key.strip()) == 1 or "  [type=" in rest, (verb, key)


def test_the_algorithms_help_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("algo.group_size=") == 1
    assert "  algo.cap=2.0  (float > 0)  [type=tis]\n      Largest weight.\n" in text
    assert "  algo.clip_eps_low=0.0003  (float > 0, < 1)  [type=gspo]" in text
    assert "  algo.normalisation=constant  (trajectory_mean | token_mean | constant)  [type=dr_grpo]" in text
    assert text.count("Divide advantages by the group's standard deviation") == 1, "shared words are said once"
    assert "  algo.dynamic_sampling=null  (settings as below | null)  [type=grpo | dr_grpo" in text


def test_what_a_mapping_holds_is_listed_by_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["distill", "--help"]) == 0
    told = capsys.readouterr().out
    assert "\n  teachers.NAME.weight=1.0  (float " in told
    assert "\n  tasks[].dataset=" in told
