"""Proves: whoever computes in a run takes the run's forms of ops before anything else, and one whose machine cannot run
them ends the run in a line: of a local run before anything is placed, on a cluster with the process's name. A run keeps
the forms that it was begun with.

Processes have no GPU here, on any machine. That tile forms compute is proven in tests/model/test_on_gpu.py.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch

from rollforward.conf.cli import main as command_line
from rollforward.conf.errors import RunDirError, UsageError
from rollforward.conf.jobs import Job
from rollforward.conf.resume import moved
from rollforward.conf.run_dir import CONFIG_NAME, check_settings
from rollforward.distill.actors import DistillActor
from rollforward.distill.config import ReverseKL
from rollforward.distill.learner import DistillSettings
from rollforward.kernels import dispatch
from rollforward.kernels.config import KernelBackends
from rollforward.kernels.errors import BackendError
from rollforward.kernels.loss import vocab_sweep
from rollforward.model.config import load_model_config
from rollforward.model.train_config import AdamW
from rollforward.rl import actors as rl_actors
from rollforward.rl.actors import LearnerActor, LearnerPool, PolicyPool
from rollforward.rl.algorithms import GRPO
from rollforward.rl.learner import LearnerSettings, check_policy
from rollforward.rl.train import policy_settings
from rollforward.rollout import actors as rollout_actors
from rollforward.rollout.actors import RolloutActor
from rollforward.rollout.config import RolloutConfig
from tests.helpers.commands import command
from tests.helpers.nodes import Nodes
from tests.helpers.replicas import PROCESS
from tests.helpers.runs import TASK, small_run, write_model
from tests.helpers.tiny import tiny_config

TILE = KernelBackends(linear_logprob="tile")
NO_GPU: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}}
WORDS = (
    f"tasks=[{json.dumps(TASK)}]".replace('"', ""),
    "optim={type: adamw, lr: 1e-3}",
    "steps=1",
    "micro_batch_tokens=256",
    "max_prompt_tokens=40",
    "eval={prompts: 4}",
    "tracker.mode=disabled",
)
LOOP = (*WORDS, "sampling.max_new_tokens=6", "prompts_per_step=2")
EVAL = (WORDS[0], "sampling.max_new_tokens=6", "prompts=4", "max_prompt_tokens=40")


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    yield
    dispatch.choose({})
    dispatch.path_of.cache_clear()


def _pretend_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that could run tile forms, if somebody had compiled them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv(dispatch.CACHE_VARIABLE, str(tmp_path / "programs"))
    dispatch.path_of.cache_clear()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as started:
        ray.init(started.address, configure_logging=False, log_to_driver=False)
        yield started


@pytest.mark.parametrize(
    ("verb", "settings", "name"),
    [
        ("train", LOOP, "mix"),
        ("distill", (*LOOP, "routing=all", "teachers={a: {model_dir: MODEL}}"), "reverse_kl"),
        ("sft", (*WORDS, "start={type: checkpoint, model_dir: MODEL}", "max_answer_tokens=8"), "mxfp4"),
        ("sft", (*WORDS, "start={type: fresh}", "max_answer_tokens=8"), "linear_logprob"),
        ("eval", EVAL, "linear_logprob"),
    ],
)
def test_a_run_of_this_machine_ends_before_anything_is_placed(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    settings: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_dir = tmp_path / "run"
    words = [one.replace("MODEL", str(model_dir)) for one in settings]
    words += [] if verb == "sft" else [f"model_dir={model_dir}"]
    assert command_line([verb, f"run_dir={run_dir}", *words, f"kernels.{name}=tile"]) == 2
    told = capsys.readouterr().err
    (line,) = (one for one in told.splitlines() if "kernels" in one)
    assert f"kernels.{name} is tile, which the run on " in line
    assert line.endswith(f"kernels.{name}=reference")
    assert "Traceback" not in told
    assert not ray.is_initialized()
    assert {path.name for path in run_dir.iterdir()} <= {CONFIG_NAME, "runs.json", "lock"}


def test_a_model_that_has_no_programs_is_refused_when_its_config_is_read(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that could run them."""
    _pretend_hopper(monkeypatch, tmp_path)
    run_dir = tmp_path / "run"
    words = ["train", f"run_dir={run_dir}", f"model_dir={model_dir}", *LOOP]
    assert command_line([*words, "kernels.mix=tile"]) == 2
    assert f"kernels.mix is tile, and {model_dir} has hidden_size 128" in capsys.readouterr().err
    assert {path.name for path in run_dir.iterdir()} == {CONFIG_NAME, "runs.json", "lock"}
    start = [*WORDS, "start={type: fresh, preset: tiny}", "max_answer_tokens=8", f"run_dir={tmp_path / 'sft'}"]
    assert command_line(["sft", *start, "kernels.mxfp4=tile"]) == 2
    told = capsys.readouterr().err
    assert "kernels.mxfp4 is tile, and the experts of start.preset=tiny have hidden_size 128" in told
    assert not (tmp_path / "sft").exists(), "the schema knows"


@pytest.mark.parametrize("verb", ["train", "sft", "eval", "distill"])
def test_programs_that_are_not_compiled_are_asked_for_before_anything_is_placed(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
) -> None:
    """On a machine that could run them."""
    _pretend_hopper(monkeypatch, tmp_path)
    run_dir, words = tmp_path / "run", {"train": LOOP, "distill": LOOP, "sft": WORDS, "eval": EVAL}[verb]
    more = {
        "train": [f"model_dir={model_dir}"],
        "eval": [f"model_dir={model_dir}"],
        "sft": [f"start={{type: checkpoint, model_dir: {model_dir}}}", "max_answer_tokens=8"],
        "distill": [f"model_dir={model_dir}", "routing=all", f"teachers={{a: {{model_dir: {model_dir}}}}}"],
    }[verb]
    name = "reverse_kl" if verb == "distill" else "linear_logprob"
    assert command_line([verb, f"run_dir={run_dir}", *words, *more, f"kernels.{name}=tile"]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "kernels" in one)
    beside = " beside teacher a" if verb == "distill" else ""
    assert f"kernels.{name} is tile, and " in line
    assert (
        f"programs for {model_dir}{beside} (vocab_size 384, hidden_size 128, moe_intermediate_size 64) are not" in line
    )
    assert line.endswith(f"`rollforward kernels warm`, or set kernels.{name}=reference")
    assert {path.name for path in run_dir.iterdir()} <= {CONFIG_NAME, "runs.json", "lock"}


def test_a_process_elsewhere_looks_for_its_programs_before_it_joins_or_opens(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend_hopper(monkeypatch, tmp_path)
    run = small_run(tmp_path, model_dir, kernels={"linear_logprob": "tile"})
    settings = LearnerSettings(algorithm=run.algo, **policy_settings(run))

    def never(*_: object) -> Any:
        raise AssertionError("too early")

    with pytest.raises(BackendError, match=r"programs for the model of rank 1 of the learner \(vocab_size 384"):
        rl_actors._joined("rank 1 of the learner", never, check_policy, never, settings)
    with pytest.raises(BackendError, match=r"programs for the model of engine-7 \(vocab_size 512"):
        rollout_actors._built("engine-7", TILE, tiny_config(), never)


def test_a_rank_looks_for_the_programs_of_student_and_teachers_before_it_joins(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a teacher of another width, and of the student as its own teacher."""
    _pretend_hopper(monkeypatch, tmp_path)
    run = small_run(tmp_path, model_dir, kernels={"linear_logprob": "tile"})
    student, teacher = (
        load_model_config(model_dir),
        msgspec.structs.replace(load_model_config(model_dir), hidden_size=64),
    )
    settings = DistillSettings(
        **policy_settings(run) | {"kernels": KernelBackends(linear_logprob="tile", reverse_kl="tile")},
        loss=ReverseKL(),
        keep_routing=True,
        teachers={},
        teacher_configs={"a": teacher},
        teacher_urls={},
        teacher_cache_dir="",
        hidden_root="",
        max_hidden_bytes=1,
    )

    def never(*_: object) -> Any:
        raise AssertionError("too early")

    def refused() -> str:
        with pytest.raises(BackendError) as raised:
            rl_actors._joined("rank 1 of the learner", never, DistillActor.__ray_actor_class__.check, never, settings)
        return str(raised.value)

    def warm(*widths: int) -> None:
        for one in vocab_sweep.programs(student.vocab_size, *widths):
            dispatch.path_of(one).parent.mkdir(exist_ok=True)
            dispatch.path_of(one).touch()

    assert "for the model of rank 1 of the learner beside teacher a (" in refused()
    warm(student.hidden_size, teacher.hidden_size)
    told = refused()
    assert "kernels.reverse_kl is tile" in told
    assert "for the model of rank 1 of the learner (" in told
    warm(student.hidden_size, student.hidden_size)
    told = refused()
    assert "kernels.linear_logprob is tile" in told
    assert "for teacher a of rank 1 of the learner (" in told
    warm(teacher.hidden_size)
    with pytest.raises(AssertionError, match="too early"):
        rl_actors._joined("rank 1 of the learner", never, DistillActor.__ray_actor_class__.check, never, settings)


@pytest.mark.parametrize("verb", ["train", "sft", "eval"])
def test_a_judge_is_asked_for_its_formats_sizes_and_programs(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """The run's own model has all of its programs."""
    _pretend_hopper(monkeypatch, tmp_path)
    rows = [json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = load_model_config(model_dir)
    (tmp_path / "programs").mkdir()
    for one in vocab_sweep.programs(config.vocab_size, config.hidden_size):
        dispatch.path_of(one).touch()
    words = {"train": LOOP, "sft": WORDS, "eval": EVAL}[verb][1:]
    more = {
        "train": [f"model_dir={model_dir}"],
        "eval": [f"model_dir={model_dir}"],
        "sft": [f"start={{type: checkpoint, model_dir: {model_dir}}}", "max_answer_tokens=8"],
    }[verb]

    def told(judge_dir: Path, precision: str) -> str:
        judge = f"{{type: model, model_dir: {judge_dir}, precision: {precision}}}"
        criteria = "[{name: right, text: It is right.}]"
        reward = f"{{type: rubric, criteria: {criteria}, judge: {judge}, max_verdict_tokens: 64}}"
        task = f"{{type: dataset, name: judged, path: {tmp_path / 'rows.jsonl'}, heldout_size: 4, reward: {reward}}}"
        given = [verb, f"run_dir={tmp_path / precision}", f"tasks=[{task}]", *words, *more]
        assert command_line([*given, "kernels.linear_logprob=tile"]) == 2
        (line,) = (one for one in capsys.readouterr().err.splitlines() if "kernels" in one)
        return line

    assert f"kernels.linear_logprob is tile and precision of judge {model_dir} is fp32" in told(model_dir, "fp32")
    other = write_model(tmp_path / "other", vocab_size=320)
    assert "programs for judge-0 (vocab_size 320, " in told(other, "native")


def test_every_rank_is_told_the_runs_forms(model_dir: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path, model_dir, kernels={"linear_logprob": "tile", "mxfp4": "tile"})
    settings = LearnerSettings(algorithm=run.algo, **policy_settings(run))
    assert settings.kernels == run.kernels == KernelBackends(linear_logprob="tile", mxfp4="tile")


def test_a_run_goes_on_with_the_forms_that_it_was_begun_with(model_dir: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path, model_dir)
    (tmp_path / "weights").mkdir()
    (tmp_path / CONFIG_NAME).write_bytes(msgspec.json.encode(run))
    assert check_settings(tmp_path, run) is None
    other = msgspec.structs.replace(run, kernels=TILE)
    with pytest.raises(RunDirError, match=r'kernels\.linear_logprob \(was "reference", now "tile"\)'):
        check_settings(tmp_path, other)
    with pytest.raises(UsageError, match="only where it works may change"):
        moved([Job("train", "train", run, tmp_path)], ["kernels.mix=tile"])


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("actor_class", [LearnerActor, DistillActor])
def test_a_rank_that_cannot_says_so_before_it_joins_and_reads(tmp_path: Path, actor_class: Any) -> None:
    settings = LearnerSettings(
        model_dir=str(tmp_path / "absent"),
        algorithm=GRPO(),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=1.0,
        threads=1,
        kernels=TILE,
    )
    actor = actor_class.options(**NO_GPU).remote(1, 2, tmp_path / "rendezvous")
    pool = LearnerPool if actor_class is LearnerActor else PolicyPool
    with pytest.raises(
        BackendError, match=r"kernels\.linear_logprob is tile, which rank 1 of the learner on \S+ cannot"
    ):
        pool([actor], settings)
    ray.kill(actor)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nodes")
def test_a_replica_that_cannot_says_so_before_it_opens_its_log(tmp_path: Path) -> None:
    config = RolloutConfig(threads=1, wal=PROCESS)
    actor: Any = RolloutActor.options(**NO_GPU).remote(  # type: ignore[attr-defined]
        "engine-7", tmp_path / "wal", tiny_config(), "native", config, None, TILE
    )
    with pytest.raises(BackendError, match=r"which engine-7 on \S+ cannot run"):
        ray.get(actor.open.remote())
    assert not (tmp_path / "wal").exists()
    ray.kill(actor)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_a_cluster_ends_with_the_process_that_cannot(nodes: Nodes, model_dir: Path, tmp_path: Path) -> None:
    words = ("train", f"run_dir={tmp_path / 'run'}", f"model_dir={model_dir}", *LOOP, "algo.group_size=2")
    where = (f"cluster.address={nodes.address}", "cluster.learner_threads=1", "rollout.threads=1")
    done = subprocess.run(
        command(*words, *where, "kernels.linear_logprob=tile"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "kernels.linear_logprob is tile, which rank 0 of the learner on " in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
