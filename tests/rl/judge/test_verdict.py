"""Proves: a verdict is read however a model wraps it, nothing is read that is not stated, and no text raises.

Does not prove: that a judge is right.
"""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.rl.judge.config import Criterion, PassFail, Points, Probability, Rubric
from rollforward.rl.judge.prompt import verdict_text
from rollforward.rl.judge.types import Verdict, VerdictFailure, VerdictProblem
from rollforward.rl.judge.verdict import read_verdict, worth

ONE = Rubric(criteria=(Criterion(name="right", text="It is the sum."),))
THREE = Rubric(
    criteria=(
        Criterion(name="right", text="It is the sum.", weight=3.0),
        Criterion(name="clear", text="It is clear.", scale=Points(lowest=1, highest=5)),
        Criterion(name="sure", text="It holds.", scale=Probability()),
    )
)
KEY = "5081"
GOOD = '{"right": "pass", "clear": 4, "sure": 0.25, "key": "5081"}'


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  {GOOD}\n",
        f"The sum is 7, so it is right.\n```json\n{GOOD}\n```\nThat is all.",
        '{"key": 5081, "sure": "0.25", "clear": "4", "right": true}',
        '{ "right" : "PASS" , "clear":4.0, "sure":2.5e-1, "key":"5081", }',
        '{"right":1,"clear":4,"sure":0.25,"key":"5081"}',
        '{"right": "yes", "clear": 4, "sure": .25, "key": "5081"} no: ' + GOOD,  # the first is none
        '{"right": "fail", "clear": 1, "sure": 0, "key": "5081"} On second thoughts ' + GOOD,
        '{"draft": 1} {"right": "fail"} ' + GOOD + ' {"note": "an object without the key"}',
        "{ {{ " + GOOD + " }} {",
        '{"verdict": ' + GOOD + "}",
        '{"right": "pass", "right": "pass", "clear": 4, "sure": 0.25, "key": "5081"}',
        GOOD + ' {"right": "fail", "clear": 1, "sure": 0, "key": "5082"}',
        GOOD + ' and then {"right": "fail", "clear": 1, "sure": 0, "key": "5081"',  # it never ends
    ],
)
def test_what_models_do_to_a_verdict_does_not_matter(text: str) -> None:
    assert read_verdict(text, THREE, KEY) == Verdict(values=(1.0, 4.0, 0.25))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", VerdictProblem.NO_OBJECT),
        ("pass", VerdictProblem.NO_OBJECT),
        ('"right": "pass", "key": "5081"', VerdictProblem.NO_OBJECT),
        ('{"right": "pass", "clear": 4, "sure": 0.25, "key": "5081"', VerdictProblem.NO_OBJECT),
        ('{"right": {"score": "pass"}, "clear": 4, "sure": 0.25, "key": "5081"}', VerdictProblem.NO_KEY),  # the inner
        ('{"right": ["pass"], "clear": 4, "sure": 0.25, "key": "5081"}', VerdictProblem.NO_OBJECT),
        ("{}", VerdictProblem.NO_KEY),
        ('{"right": "pass", "clear": 4, "sure": 0.25}', VerdictProblem.NO_KEY),
        ('{"right": "pass", "clear": 4, "sure": 0.25, "key": "5082"}', VerdictProblem.NO_KEY),
        ('{"right": "pass", "clear": 4, "sure": 0.25, "key": 5081.0}', VerdictProblem.NO_KEY),
        ('{"right": "pass", "clear": 4, "sure": 0.25, "key": "\\u0035081"}', VerdictProblem.NO_KEY),
        ('{"right": "pass", "clear": 4, "sure": 0.25, "Key": "5081"}', VerdictProblem.NO_KEY),
        (GOOD.replace("}", ', "tone": 3}'), VerdictProblem.UNKNOWN_CRITERION),
        (GOOD.replace('"right"', '"Right"'), VerdictProblem.UNKNOWN_CRITERION),
        ('{"right": "pass", "clear": 4, "key": "5081"}', VerdictProblem.MISSING_CRITERION),
        (GOOD.replace('"pass"', '"maybe"'), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace('"pass"', '""'), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace('"pass"', "0.5"), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("4", "null"), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("4", "4.5"), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("4", '"4/5"'), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("4", "true"), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("0.25", "NaN"), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("0.25", "-Infinity"), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("0.25", '"nan"'), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("0.25", "0.2_5"), VerdictProblem.NO_OBJECT),
        (GOOD.replace("0.25", "٠"), VerdictProblem.NO_OBJECT),
        (GOOD.replace("0.25", '"٠"'), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("4", "6"), VerdictProblem.OUT_OF_SCALE),
        (GOOD.replace("4", "0"), VerdictProblem.OUT_OF_SCALE),
        (GOOD.replace("0.25", "1.0001"), VerdictProblem.OUT_OF_SCALE),
        (GOOD.replace("0.25", "-0.1"), VerdictProblem.OUT_OF_SCALE),
        (GOOD.replace("0.25", "1e999"), VerdictProblem.OUT_OF_SCALE),
        (GOOD.replace("0.25", "9" * 5000), VerdictProblem.NOT_A_VALUE),
        (GOOD.replace("}", ', "right": "fail"}'), VerdictProblem.CONTRADICTION),
        (GOOD.replace("}", ', "key": "1111"}'), VerdictProblem.CONTRADICTION),
        # The last one with the key counts, whatever is wrong with it: the one before may be a draft.
        (GOOD + ' no: {"right": "perhaps", "clear": 4, "sure": 0.25, "key": "5081"}', VerdictProblem.NOT_A_VALUE),
    ],
)
def test_what_is_no_verdict_says_why(text: str, kind: VerdictProblem) -> None:
    said = read_verdict(text, THREE, KEY)
    assert isinstance(said, VerdictFailure)
    assert said.kind is kind
    assert len(said.detail) < 80


def test_every_kind_that_a_text_can_have_is_in_the_table_above() -> None:
    elsewhere = {
        VerdictProblem.LOST,
        VerdictProblem.CUT_SHORT,
        VerdictProblem.UNCLOSED_THINKING,
        VerdictProblem.CONTROL_TOKEN,
    }
    (marker,) = [
        mark
        for mark in test_what_is_no_verdict_says_why.pytestmark
        if mark.name == "parametrize"  # type: ignore[attr-defined]
    ]
    assert {kind for _, kind in marker.args[1]} | elsewhere == set(VerdictProblem)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_and_never_give_a_verdict(data: bytes) -> None:
    assert isinstance(read_verdict(data.decode("utf-8", "replace"), ONE, KEY), VerdictFailure)


_FRAGMENTS = st.sampled_from(
    ["{", "}", '"', "\\", ":", ",", " ", "\n", "right", "key", "5081", '"5081"', '"key"', '"right"', '"pass"', "fail",
     "1", "NaN", "null", "[", "]", "```", "{}", "'", "\ud7ff", "e", "-"]
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(_FRAGMENTS, max_size=30))
def test_a_verdict_is_stated_in_one_object_that_holds_the_key(fragments: list[str]) -> None:
    """The oracle is Python's own JSON: where a verdict is read, one of the text's objects states it, commas before a
    closing brace aside."""
    text = "".join(fragments)
    said = read_verdict(text, ONE, KEY)
    if isinstance(said, VerdictFailure):
        return
    starts = [index for index, character in enumerate(text) if character == "{"]
    ends = [index + 1 for index, character in enumerate(text) if character == "}"]
    stated = [text[start:end] for start in starts for end in ends]
    words = {1.0: ("pass", "1"), 0.0: ("fail",)}[said.values[0]]
    assert any(KEY in one and '"right"' in one and any(word in one for word in words) for one in stated)


def test_fragments_do_give_verdicts() -> None:
    """The property above is not empty."""
    assert read_verdict('{"right":"pass","key":5081}', ONE, KEY) == Verdict(values=(1.0,))
    assert read_verdict('{"key":"5081","right":fail,}', ONE, KEY) == Verdict(values=(0.0,))


@given(
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 5),
    st.floats(0, 1, allow_subnormal=False).map(lambda value: float(f"{value:g}")),
    st.integers(1000, 10**9),
    st.permutations(range(3)),
)
def test_what_is_shown_to_learn_from_is_read_back(
    right: float, clear: int, sure: float, key: int, order: list[int]
) -> None:
    values = (right, float(clear), sure)
    text = verdict_text(THREE, values, key=str(key), order=order)
    assert read_verdict(text, THREE, str(key)) == Verdict(values=values)
    assert list(json.loads(text)) == [*(THREE.criteria[index].name for index in order), "key"]


@given(st.data())
def test_one_character_changed_gives_the_same_verdict_or_none_or_a_stated_one(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(GOOD) - 1))
    other = data.draw(st.characters())
    text = GOOD[:place] + other + GOOD[place + 1 :]
    said = read_verdict(text, THREE, KEY)
    if isinstance(said, Verdict):
        try:
            stated = json.loads(text)
        except ValueError:
            assert said == Verdict(values=(1.0, 4.0, 0.25))  # such as another comma
            return
        assert said.values[1] == float(stated["clear"])
        assert said.values[2] == float(stated["sure"])


@pytest.mark.parametrize(
    "text",
    [
        "{" * 200_000,
        '{"' * 100_000,
        '{"a":' * 40_000,
        '{"a":"{",' * 30_000,
        '{"a":1,' * 30_000,
        '{"' + '{\\"' * 60_000,
        "{" + " " * 200_000,
        '{"a":"b"}' * 20_000,
        '{ "a" : "' * 30_000,
    ],
)
def test_reading_takes_time_linear_in_the_text(text: str) -> None:
    start_s = time.process_time()
    read_verdict(text, ONE, KEY)
    assert time.process_time() - start_s < 10.0


def test_worth_is_weighted_and_exact_at_the_ends() -> None:
    assert worth((1.0, 3.0, 0.5), THREE) == pytest.approx((3 + 0.5 + 0.5) / 5)
    tenths = Rubric(criteria=tuple(Criterion(name=f"c{i}", text="x", weight=0.1) for i in range(7)))
    assert worth((1.0,) * 7, tenths) == 1.0
    assert worth((0.0,) * 7, tenths) == 0.0
    assert worth((1.0, 5.0, 1.0), THREE) == 1.0
    assert worth((0.0, 1.0, 0.0), THREE) == 0.0
    assert PassFail().bounds == (0.0, 1.0)
