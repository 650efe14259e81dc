"""Proves: what a run of distillation cannot be is refused with value, rule and way out, in the order of what it costs
to find out: the schema without torch or ray, who teaches what before anything is read, teachers before anything is
allocated.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from rollforward.conf.cli import main as command_line
from rollforward.conf.errors import ConfigError
from rollforward.conf.jobs import plan_jobs
from rollforward.conf.load import decode
from rollforward.distill import ahead
from rollforward.distill.config import DistillRun, ForwardKL, JensenShannon, ReverseKL, SampledToken
from rollforward.distill.errors import HiddenRoomError, TeacherError, TeacherMismatchError, TeacherReadError
from rollforward.distill.teacher_files import check_present
from rollforward.distill.train import find_teachers, main, teacher_urls
from rollforward.kernels.errors import BackendError
from tests.helpers.distill_runs import small_distill, write_models
from tests.helpers.runs import TASK

RUN: dict[str, Any] = {
    "run_dir": "runs/a",
    "model_dir": "models/sft",
    "teachers": {"maths": {"model_dir": "models/maths", "tasks": ["sum"]}},
    "tasks": [{"type": "reasoning_gym", "name": "sum", "dataset": "chain_sum"}],
    "optim": {"type": "adamw", "lr": 1e-5},
    "sampling": {"max_new_tokens": 64},
    "steps": 10,
    "prompts_per_step": 8,
    "micro_batch_tokens": 1024,
}


def _merged(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`base` with one dotted override, as the command line would make it."""
    head, _, rest = path.partition(".")
    return {**base, head: _merged(base.get(head, {}), rest, value) if rest else value}


def _decoded(overrides: dict[str, Any]) -> DistillRun:
    data = RUN
    for path, value in overrides.items():
        data = _merged(data, path, value)
    return msgspec.convert(data, DistillRun)


def test_the_root_decodes_with_defaults_and_comes_back_from_json() -> None:
    run = _decoded({})
    assert msgspec.json.decode(msgspec.json.encode(run), type=DistillRun) == run
    assert (run.loss, run.routing, run.samples_per_prompt, run.normalisation, run.keep_routing) == (
        ReverseKL(),
        "task",
        1,
        "token_mean",
        True,
    )
    assert (run.teacher_cache.max_hidden_gib, run.teachers["maths"].weight) == (64.0, 1.0)


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        ({"type": "reverse_kl"}, ReverseKL()),
        ({"type": "forward_kl"}, ForwardKL()),
        ({"type": "jensen_shannon", "beta": 0.1}, JensenShannon(beta=0.1)),
        ({"type": "sampled_token", "baseline": True}, SampledToken(baseline=True)),
    ],
)
def test_losses_decode_by_their_type(data: dict[str, Any], loss: object) -> None:
    assert _decoded({"loss": data}).loss == loss


ROUTES = r"replayed routes are not what the router chooses now. Set keep_routing=false, or balance\.bias_update_speed=0"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"teachers": {}}, r"teachers is empty; there is nobody to learn from\. Name one: teachers=\{NAME: "),
        (
            {"teachers.maths.model_dir": None},
            r"teachers\.maths has no model_dir and teacher_store is not set; .* Set one of them",
        ),
        ({"teachers": {"a b": {"model_dir": "x"}}}, "a teacher is named 'a b'; a name is at most 64 letters"),
        ({"teachers": {"../a": {"model_dir": "x"}}}, "a teacher is named '../a'; a name is at most 64 letters"),
        ({"teachers": {".a": {"model_dir": "x"}}}, "a teacher is named '.a'; a name is at most 64 letters"),
        ({"teachers": {"a" * 65: {"model_dir": "x"}}}, "is at most 64 letters"),
        ({"teachers": {"a\n": {"model_dir": "x"}}}, r"a teacher is named 'a\\n'"),
        ({"teachers": {"a": {"model_dir": "x"}, "A": {"model_dir": "y"}}}, "named a, A; on some disks"),
        ({"teachers.maths.weight": 0}, r">= 1e-09.*teachers.*\.weight"),
        ({"teachers.maths.weight": 1e-46}, r">= 1e-09"),
        ({"teachers.maths.weight": 1e39}, r"<= 1000000000\.0"),
        ({"teacher_cache.max_hidden_gib": 1e300}, r"<= 1000000\.0"),
        ({"teachers.maths.task": "sum"}, "unknown field `task`"),
        ({"routing": "tasks"}, "Invalid enum value 'tasks'"),
        ({"loss": {"type": "kl"}}, "Invalid value 'kl'"),
        ({"loss": {"type": "jensen_shannon", "beta": 0}}, r"> 0\.0"),
        ({"loss": {"type": "jensen_shannon", "beta": 1}}, r"< 1\.0"),
        ({"loss": {"type": "reverse_kl", "beta": 0.5}}, "unknown field `beta`"),
        ({"samples_per_prompt": 0}, ">= 1"),
        ({"normalisation": "sum"}, "Invalid enum value 'sum'"),
        ({"teacher_cache.max_hidden_gib": 0}, r"> 0\.0"),
        ({"algo": {"type": "grpo"}}, "unknown field `algo`"),
        ({"balance.bias_update_speed": 1e-3}, f"balance is on and keep_routing is true; {ROUTES}"),
        ({"balance.loss_weight": 1e-3}, f"balance is on and keep_routing is true; {ROUTES}"),
        (
            {"loss": {"type": "sampled_token"}, "sampling.top_p": 0.9},
            r"loss is sampled_token and sampling draws from another distribution.*biased.*temperature=1 without top_p",
        ),
        ({"loss": {"type": "sampled_token"}, "sampling.top_k": 40}, "loss is sampled_token and sampling draws"),
        (
            {"loss": {"type": "sampled_token", "baseline": True}, "sampling.temperature": 0.7},
            "loss is sampled_token and sampling draws",
        ),
        # The loop's own rules hold here too.
        ({"sampling.temperature": 0}, r"sampling\.temperature is 0; .* Set sampling\.temperature=1"),
        ({"micro_batch_tokens": 575}, r"max_prompt_tokens \+ sampling\.max_new_tokens = 512 \+ 64 = 576 tokens"),
        ({"cluster.learner_ranks": 3}, r"cluster\.learner_ranks is 3; .* cluster\.learner_ranks=2"),
    ],
)
def test_what_would_fail_later_is_refused_with_the_way_out(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"(?s){message}"):
        _decoded(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"loss": {"type": "forward_kl"}, "sampling.top_p": 0.9, "sampling.temperature": 0.7},
        {"balance.bias_update_speed": 1e-3, "keep_routing": False},
        {"teachers.maths.model_dir": None, "teacher_store": "s3://teachers"},
        {"teachers.maths.model_dir": "https://models/maths"},
    ],
)
def test_what_is_exact_or_said_elsewhere_is_let_through(overrides: dict[str, Any]) -> None:
    _decoded(overrides)


@pytest.mark.parametrize(
    "words",
    [
        ["distill", "--help"],
        ["distill", "teachers={}"],
        ["distill", "teachers={a: {model_dir: x}}", "loss.type=kl"],
        ["distill", "--cfg", "job", "recipe=tiny_pipeline"],
    ],
)
def test_answering_about_a_run_imports_neither_torch_nor_ray(words: list[str]) -> None:
    heavy = "{'torch', 'ray', 'deepspeed', 'transformers', 'wandb', 'reasoning_gym', 'fsspec', 'pyarrow'}"
    code = (
        "import sys; from rollforward.conf.cli import main; main(sys.argv[1:]); "
        f"sys.exit(','.join({heavy} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root, "student", "a")
    return root


def _refused(run: DistillRun, error: type[Exception]) -> str:
    """What the command says, after which nothing is there."""
    with pytest.raises(error) as caught:
        main(run)
    assert not ray.is_initialized()
    assert not Path(run.run_dir).exists()
    return str(caught.value)


def test_who_teaches_what_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    """Neither the student nor the teachers are there."""
    nowhere = str(tmp_path / "nowhere")
    for teachers, routing, words in (
        (
            {"a": {"model_dir": nowhere, "tasks": ["chain_sum"]}},
            "task",
            ["nobody teaches other", "teachers.NAME.tasks"],
        ),
        ({"a": {"model_dir": nowhere}}, "task", ["teachers.a.tasks is empty", "chain_sum, other"]),
        ({"a": {"model_dir": nowhere, "tasks": ["chain_sums"]}}, "task", ["names chain_sums", "chain_sum, other"]),
        ({"a": {"model_dir": nowhere, "tasks": ["other"]}}, "all", ["routing is 'all'", "set routing=task"]),
    ):
        with pytest.raises(msgspec.ValidationError) as caught:
            small_distill(tmp_path / "run", tmp_path / "x", teachers, routing=routing)
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("change", ["teachers.sums.tasks=[sumz]", "teachers.sums.tasks=[]", "routing=all"])
def test_a_pipeline_whose_last_stage_nobody_could_teach_does_not_begin(change: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks|nobody teaches"):
        plan_jobs("train", ["recipe=tiny_pipeline", f"opd.{change}"])


def test_a_path_means_the_same_to_processes_that_work_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    teachers = {"a": {"model_dir": "models/a"}, "b": {"model_dir": "s3://bucket/b"}, "c": {}}
    here = {"a": f"{tmp_path}/models/a", "b": "s3://bucket/b"}
    for store, of_c in (
        ("store", f"{tmp_path}/store/c"),
        ("gs://store/", "gs://store/c"),
        ("~/x", f"{Path.home()}/x/c"),
    ):
        run = small_distill(tmp_path / "run", tmp_path / "x", teachers, routing="all", teacher_store=store)
        assert teacher_urls(run) == here | {"c": of_c}


def test_a_teacher_that_is_not_there_or_of_another_tokenizer_is_refused_before_anything_is_allocated(
    models: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(models / "a", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (next(text for text, index in vocabulary.items() if index == wanted) for wanted in (300, 301))
    vocabulary[first], vocabulary[second] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copytree(models / "a", tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    for teachers, error, words in (
        ({"a": {"model_dir": str(tmp_path / "absent")}}, TeacherError, ["absent is no directory", "model_dir"]),
        ({"a": {"model_dir": str(tmp_path / "bare")}}, TeacherError, ["bare has no config.json", "model_dir"]),
        (
            {"a": {"model_dir": str(models / "a")}, "b": {"model_dir": str(other)}},
            TeacherMismatchError,
            [f"teacher b in {other}: entry 300 of tokenizer.json is", "of the student in", "Take a teacher that was"],
        ),
    ):
        told = _refused(small_distill(tmp_path / "run", models / "student", teachers, routing="all"), error)
        assert [word for word in words if word not in told] == [], told


def test_a_teacher_that_nobody_makes_is_looked_for_before_the_first_run_of_a_recipe(
    models: Path, tmp_path: Path
) -> None:
    made, absent = {"model_dir": str(tmp_path / "first" / "model")}, {"model_dir": "/nope"}
    run = small_distill(tmp_path / "run", models / "student", {"a": made, "b": absent}, routing="all")
    with pytest.raises(TeacherError, match=r"^teachers\.b: /nope is no directory; .*teacher_store$"):
        ahead.check(run, [tmp_path / "first"])
    with pytest.raises(TeacherError, match=r"^teachers\.a: .*/first/model is no directory"):
        ahead.check(run, [])
    remote = {"a": made, "b": {"model_dir": "memory://nowhere/b"}}
    with pytest.raises(TeacherError, match=r"^teachers\.b: memory://nowhere/b is no directory"):
        ahead.check(small_distill(tmp_path / "run", models / "student", remote, routing="all"), [tmp_path / "first"])
    there = {"a": made, "b": {"model_dir": str(models / "a")}}
    ahead.check(small_distill(tmp_path / "run", models / "student", there, routing="all"), [tmp_path / "first"])


def test_a_step_that_may_need_more_room_than_it_has_is_refused(models: Path, tmp_path: Path) -> None:
    """Six completions of up to six tokens, of width 128 and twice as many teachers: some 8 KiB of vectors and as much
    of manifests."""
    teachers = {"a": {"model_dir": str(models / "a")}, "b": {"model_dir": str(models / "a")}}
    tight = {"teacher_cache": {"max_hidden_gib": 20 * 2**10 / 2**30}, "tasks": [TASK]}
    told = _refused(
        small_distill(tmp_path / "run", models / "student", teachers, routing="all", **tight), HiddenRoomError
    )
    assert "teacher_cache.max_hidden_gib is 1.90735e-05" in told
    assert "Raise it if the disk of run_dir has the room, or sample less" in told


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("/nowhere", 2, "/nowhere is no directory; a teacher is a model directory. Correct its model_dir"),
        ("http://ann:secret@127.0.0.1:1/x", 1, "http://***@127.0.0.1:1/x cannot be read: "),
        ("nope://x", 2, "nope://x: Protocol not known: nope; a teacher's URL is one that fsspec knows"),
    ],
)
def test_a_refusal_is_told_by_the_command_line_without_a_traceback(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, code: int, said: str
) -> None:
    words = [
        f"run_dir={tmp_path / 'run'}",
        f"model_dir={models / 'student'}",
        f"teachers={{a: {{model_dir: '{where}'}}}}",
    ]
    words.append(f"teacher_cache.directory={tmp_path / 'teachers'}")
    task = "tasks=[{type: reasoning_gym, name: sum, dataset: chain_sum}]"
    settings = ["optim={type: adamw, lr: 1e-3}", "sampling.max_new_tokens=6", "steps=1", "prompts_per_step=2"]
    assert command_line(["distill", *words, task, *settings, "micro_batch_tokens=600", "routing=all"]) == code
    told = capsys.readouterr().err
    assert f"error: teachers.a: {said}" in told
    assert "Traceback" not in told
    assert "secret" not in told
    with pytest.raises((TeacherError, TeacherReadError)) as caught:  # as the check ahead asks
        check_present(where, "teachers.a")
    assert str(caught.value).startswith(f"teachers.a: {said}")


def test_a_teacher_that_has_no_programs_is_named(models: Path, tmp_path: Path) -> None:
    teachers = {"a": {"model_dir": str(models / "a")}}
    run = small_distill(tmp_path / "run", models / "student", teachers, routing="all", kernels={"mix": "tile"})
    with pytest.raises(BackendError, match=r"kernels\.mix is tile, and teacher a has hidden_size 128"):
        find_teachers(run, teacher_urls(run))


def test_tile_forms_need_native_precision() -> None:
    assert _decoded({"kernels.reverse_kl": "tile"}).kernels.tiles == ("reverse_kl",)
    with pytest.raises(msgspec.ValidationError, match=r"kernels\.reverse_kl is tile and precision is fp32"):
        _decoded({"kernels.reverse_kl": "tile", "precision": "fp32"})


def test_of_several_teachers_the_one_at_fault_is_named() -> None:
    teachers = {"maths": RUN["teachers"]["maths"], "code": {"model_dir": "x", "weight": 0}}
    with pytest.raises(ConfigError, match=r"^teachers\.code\.weight is 0; expected float >= 1e-09"):
        decode(DistillRun, RUN | {"teachers": teachers})
