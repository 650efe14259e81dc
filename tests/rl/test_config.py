"""The schema: what is refused, with which way out, and that reading it costs neither torch nor ray."""

import subprocess
import sys
import typing
from typing import Any

import msgspec
import pytest

from rollforward.rl.algorithms import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    TIS,
    Algorithm,
    DrGRPO,
    DynamicSampling,
    IcePop,
)
from rollforward.rl.config import CheckpointModel, EvalRun, FreshModel, RLRun, SFTRun

TASK = {"type": "reasoning_gym", "name": "sum", "dataset": "chain_sum"}
OPTIM = {"type": "adamw", "lr": 1e-5}
RL = {
    "run_dir": "runs/a",
    "model_dir": "models/sft",
    "tasks": [TASK],
    "algo": {"type": "grpo"},
    "optim": OPTIM,
    "sampling": {"max_new_tokens": 64},
    "steps": 10,
    "prompts_per_step": 8,
    "micro_batch_tokens": 1024,
}
SFT = {
    "run_dir": "runs/a",
    "start": {"type": "checkpoint", "model_dir": "models/init"},
    "tasks": [TASK],
    "optim": OPTIM,
    "steps": 10,
    "micro_batch_tokens": 1024,
}
EVAL = {
    "run_dir": "runs/a",
    "model_dir": "models/sft",
    "tasks": [TASK],
    "sampling": {"max_new_tokens": 64, "temperature": 0},
}
ROOTS = {RLRun: RL, SFTRun: SFT, EvalRun: EVAL}


def _merged(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`base` with one dotted override, as the command line would make it."""
    head, _, rest = path.partition(".")
    return {**base, head: _merged(base.get(head, {}), rest, value) if rest else value}


@pytest.mark.parametrize("root", ROOTS)
def test_roots_decode_with_defaults_and_come_back_from_json(root: type) -> None:
    run = msgspec.convert(ROOTS[root], root)
    assert msgspec.json.decode(msgspec.json.encode(run), type=root) == run


def test_defaults_of_the_algorithm_are_deepseeks() -> None:
    assert msgspec.convert(RL, RLRun).algo == GRPO(
        group_size=8,
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        kl_beta=0.001,
        advantage_std=False,
        normalisation="trajectory_mean",
    )


def test_sft_starts_fresh_or_from_a_checkpoint() -> None:
    assert msgspec.convert(_merged(SFT, "start", {"type": "fresh"}), SFTRun).start == FreshModel(preset="tiny", seed=0)
    assert msgspec.convert(SFT, SFTRun).start == CheckpointModel(model_dir="models/init")


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("path", ["stepz", "tracker_", "rollout.engine"])
def test_an_unknown_key_is_refused_by_name(root: type, path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"unknown field `{path.rpartition('.')[2]}`"):
        msgspec.convert(_merged(ROOTS[root], path, 1), root)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("algo.type", "ppo", r"Invalid value 'ppo'.*\$\.algo\.type"),
        ("algo.group_size", 1, r"group_size is 1; .* at least 2 members\. Set algo\.group_size=2.*\$\.algo"),
        ("algo.group_size", 2.5, r"Expected `int`.*\$\.algo\.group_size"),
        ("algo.clip_eps_low", 1.0, r"\$\.algo\.clip_eps_low"),
        ("algo.clip_eps_high", 0.0, r"\$\.algo\.clip_eps_high"),
        ("algo.kl_beta", -0.1, r"\$\.algo\.kl_beta"),
        ("algo.opsm_delta", 0.0, r"\$\.algo\.opsm_delta"),
        ("algo.normalisation", "mean", r"\$\.algo\.normalisation"),
        ("algo.truncation", "drop", r"\$\.algo\.truncation"),
        ("optim.lr", 0, r"\$\.optim\.lr"),
        ("optim.betas", [0.9, 1.0], r"\$\.optim\.betas"),
        ("optim.warmup_steps", 11, r"optim\.warmup_steps is 11, but the run has 10 steps.*Set optim\.warmup_steps=10"),
        (
            "optim.decay_steps",
            9,
            r"decay_steps is 9 after 0 of warm-up, but the run has 10 steps, of which the last 1 .*10",
        ),
        ("sampling.temperature", 1e-30, r"temperature is 1e-30; .*overflow.*\$\.sampling"),
        ("eval.temperature", 1e-30, r"temperature is 1e-30; .*overflow.*\$\.eval"),
        ("sampling.temperature", 0, r"temperature is 0; .*Set sampling\.temperature=1"),
        (
            "sampling.max_new_tokens",
            513,
            r"micro_batch_tokens is 1024, but .* 512 \+ 513 = 1025.*Set micro_batch_tokens=1025",
        ),
        ("steps", True, r"\$\.steps"),
        ("prompts_per_step", 0, r"\$\.prompts_per_step"),
        ("rollout.engines", 0, r"\$\.rollout\.engines"),
        ("rollout.wal.level", "disk", r"\$\.rollout\.wal\.level"),
        ("precision", "bf16", r"\$\.precision"),
        ("eval.prompts", 201, r"eval\.prompts is 201, but task sum keeps 200 held-out prompts.*Set eval\.prompts=200"),
        ("tasks", [], r"tasks is empty"),
        ("tracker.mode", "on", r"\$\.tracker\.mode"),
    ],
)
def test_wrong_values_of_an_rl_run_are_refused_with_the_way_out(path: str, value: Any, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(_merged(RL, path, value), RLRun)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("algo.group_size", 2),
        ("algo.opsm_delta", None),
        ("algo.kl_beta", 0),
        ("sampling.max_new_tokens", 512),
        ("optim.warmup_steps", 10),
        ("optim.decay_steps", 10),
        ("eval.prompts", 200),
    ],
)
def test_values_at_the_bounds_are_accepted(path: str, value: Any) -> None:
    msgspec.convert(_merged(RL, path, value), RLRun)


@pytest.mark.parametrize(
    ("root", "path", "value", "message"),
    [
        (SFTRun, "start", {"type": "folder"}, r"Invalid value 'folder'.*\$\.start\.type"),
        (SFTRun, "start", {"type": "fresh", "model_dir": "a"}, "unknown field `model_dir`"),
        (SFTRun, "start", {"type": "fresh", "preset": "small"}, r"\$\.start\.preset"),
        (SFTRun, "max_answer_tokens", 513, r"max_answer_tokens = 512 \+ 513"),
        (SFTRun, "optim.warmup_steps", 11, "warmup_steps is 11"),
        (SFTRun, "eval.prompts", 201, r"eval\.prompts is 201"),
        (EvalRun, "prompts", 201, r"prompts is 201"),
        (EvalRun, "tasks", [], "tasks is empty"),
        (EvalRun, "rollout.engines", 2, r"rollout\.engines is 2; eval samples with one engine"),
        (SFTRun, "rollout.engines", 2, r"rollout\.engines is 2; sft evaluates with one engine"),
    ],
)
def test_wrong_values_of_other_runs_are_refused(root: type, path: str, value: Any, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(_merged(ROOTS[root], path, value), root)


@pytest.mark.parametrize("root", ROOTS)
def test_tile_forms_need_what_is_known_without_a_gpu(root: type) -> None:
    tile = _merged(ROOTS[root], "kernels", {"linear_logprob": "tile", "mix": "tile"})
    assert msgspec.convert(tile, root).kernels.tiles == ("linear_logprob", "mix")
    assert msgspec.convert(ROOTS[root], root).kernels.tiles == ()
    with pytest.raises(
        msgspec.ValidationError, match=r"kernels\.linear_logprob is tile and precision is fp32;.*native"
    ):
        msgspec.convert(tile | {"precision": "fp32"}, root)
    with pytest.raises(
        msgspec.ValidationError, match=r"kernels\.reverse_kl is tile, and (train|sft|eval) has no teach"
    ):
        msgspec.convert(_merged(ROOTS[root], "kernels", {"reverse_kl": "tile"}), root)
    with pytest.raises(msgspec.ValidationError, match=r"Invalid enum value 'triton'.*\$\.kernels\.mix"):
        msgspec.convert(_merged(ROOTS[root], "kernels.mix", "triton"), root)


@pytest.mark.parametrize("name", ["flash", "mini", "tiny"])
def test_a_preset_that_has_no_programs_is_refused_by_the_schema(name: str) -> None:
    data = _merged(_merged(SFT, "start", {"type": "fresh", "preset": name}), "kernels", {"mix": "tile"})
    if name != "tiny":
        msgspec.convert(data, SFTRun)
        return
    with pytest.raises(
        msgspec.ValidationError, match=r"start\.preset=tiny has hidden_size 128.*kernels\.mix=reference"
    ):
        msgspec.convert(data, SFTRun)


def test_the_algorithm_is_told_apart_by_its_type() -> None:
    assert msgspec.to_builtins(GRPO())["type"] == "grpo"
    assert msgspec.convert({"type": "grpo", "group_size": 4}, Algorithm).group_size == 4


COMMON = {
    "group_size": 8,
    "kl_beta": 0.0,
    "advantage_std": False,
    "normalisation": "trajectory_mean",
    "truncation": "keep",
    "keep_routing": True,
    "dynamic_sampling": None,
}
OWN: dict[type[Algorithm], dict[str, Any]] = {
    GRPO: {"kl_beta": 0.001, "clip_eps_low": 0.2, "clip_eps_high": 0.2, "opsm_delta": 0.1},
    DAPO: {
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.28,
        "advantage_std": True,
        "normalisation": "token_mean",
        "dynamic_sampling": {"max_rounds": 4},
    },
    DrGRPO: {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "normalisation": "constant"},
    GSPO: {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "advantage_std": True},
    CISPO: {"clip_eps_low": 1.0, "clip_eps_high": 0.28, "advantage_std": True, "normalisation": "token_mean"},
    TIS: {"cap": 2.0, "level": "token"},
    IcePop: {"ratio_min": 0.5, "ratio_max": 5.0},
}
TYPES = {GRPO: "grpo", DAPO: "dapo", DrGRPO: "dr_grpo", GSPO: "gspo", CISPO: "cispo", TIS: "tis", IcePop: "icepop"}


def test_every_algorithm_is_written_down_here() -> None:
    assert set(OWN) == set(TYPES) == set(typing.get_args(Algorithm))


@pytest.mark.parametrize("algorithm", OWN, ids=lambda algorithm: algorithm.__name__)
def test_defaults_of_an_algorithm_and_its_type(algorithm: type[Algorithm]) -> None:
    """Its own settings and no others: what an algorithm cannot use it does not have."""
    expected = {"type": TYPES[algorithm], **COMMON, **OWN[algorithm]}
    assert msgspec.to_builtins(algorithm()) == expected
    assert msgspec.convert({"type": TYPES[algorithm]}, Algorithm) == algorithm()
    assert msgspec.convert(_merged(RL, "algo", expected), RLRun).algo == algorithm()


@pytest.mark.parametrize("kind", TYPES.values())
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("group_size", 1, r"group_size is 1; .* Set algo\.group_size=2"),
        ("kl_beta", -1e-9, r"\$\.algo\.kl_beta"),
        ("advantage_std", "yes", r"\$\.algo\.advantage_std"),
        ("normalisation", "sum", r"\$\.algo\.normalisation"),
        ("truncation", "drop", r"\$\.algo\.truncation"),
        ("keep_routing", 1, r"\$\.algo\.keep_routing"),
        ("dynamic_sampling", True, r"\$\.algo\.dynamic_sampling"),
        ("dynamic_sampling", {"max_rounds": 1}, r"\$\.algo\.dynamic_sampling\.max_rounds"),
        ("dynamic_sampling", {"rounds": 4}, r"unknown field `rounds`"),
    ],
)
def test_wrong_values_that_every_algorithm_refuses(kind: str, field: str, value: Any, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(_merged(RL, "algo", {"type": kind, field: value}), RLRun)


@pytest.mark.parametrize(
    ("kind", "field", "bad", "good"),
    [
        *((kind, "clip_eps_low", bad, 0.999) for kind in ("grpo", "dapo", "dr_grpo", "gspo") for bad in (0.0, 1.0)),
        *((kind, "clip_eps_high", 0.0, 9.0) for kind in ("grpo", "dapo", "dr_grpo", "gspo", "cispo")),
        ("cispo", "clip_eps_low", 0.0, 1.0),
        ("cispo", "clip_eps_low", 1.001, 0.001),
        ("grpo", "opsm_delta", 0.0, None),
        ("tis", "cap", 0.0, 0.001),
        ("tis", "level", "geometric", "sequence"),
        ("icepop", "ratio_min", 0.0, 0.001),
        ("icepop", "ratio_min", 1.0, 0.999),
        ("icepop", "ratio_max", 1.0, 1.001),
    ],
)
def test_bounds_of_an_algorithms_own_settings(kind: str, field: str, bad: Any, good: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.algo\.{field}"):
        msgspec.convert(_merged(RL, "algo", {"type": kind, field: bad}), RLRun)
    assert getattr(msgspec.convert(_merged(RL, "algo", {"type": kind, field: good}), RLRun).algo, field) == good


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("tis", "clip_eps_low"),
        ("icepop", "clip_eps_high"),
        ("dapo", "opsm_delta"),
        ("grpo", "cap"),
        ("tis", "ratio_min"),
        ("icepop", "level"),
    ],
)
def test_a_setting_of_another_algorithm_is_refused(kind: str, field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"unknown field `{field}`"):
        msgspec.convert(_merged(RL, "algo", {"type": kind, field: 0.5}), RLRun)


def test_dynamic_sampling_is_a_choice_of_every_algorithm() -> None:
    for kind in TYPES.values():
        for value, expected in (
            ({}, DynamicSampling(max_rounds=4)),
            ({"max_rounds": 2}, DynamicSampling(max_rounds=2)),
            (None, None),
        ):
            algo = {"type": kind, "dynamic_sampling": value}
            assert msgspec.convert(_merged(RL, "algo", algo), RLRun).algo.dynamic_sampling == expected


def test_the_schema_imports_neither_torch_nor_ray() -> None:
    script = (
        "import sys, rollforward.rl.config; "
        "sys.exit(','.join(m for m in ('torch', 'ray', 'hydra', 'reasoning_gym', 'deepspeed') if m in sys.modules) or"
        " 0)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


CALCULATOR = {"name": "calculator"}
WITH_TOOLS = TASK | {"tools": [CALCULATOR], "max_turns": 3, "max_observation_tokens": 40}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"effort": "medium"}, r"Invalid enum value 'medium'"),
        ({"max_new_tokens": 0}, r">= 1"),
        ({"max_turns": 1}, r">= 2"),
        ({"tools": [{"name": "a b"}]}, r"matching regex"),
        ({"tools": [CALCULATOR, CALCULATOR]}, r"2 tools are named 'calculator'.*Rename all but one"),
        (
            {
                "demonstrate": [{"type": "call", "tool": "calc", "argument": "a", "metadata": "b"}],
                "tools": [CALCULATOR],
            },
            r"demonstrate\.tool is 'calc'; it must be one of the task's tools, which are calculator\. Add it to tools",
        ),
        (
            {"length_penalty": {"buffer_tokens": 65}},
            r"task sum: length_penalty\.buffer_tokens is 65, but a completion has at most 64.*Set it to 64 or less",
        ),
        (
            {"length_penalty": {"buffer_tokens": 9}, "max_new_tokens": 8},
            r"length_penalty\.buffer_tokens is 9, but a completion has at most 8",
        ),
        ({"max_new_tokens": 513}, r"max_prompt_tokens \+ max_new_tokens of sum = 512 \+ 513 = 1025 tokens"),
        (
            {"max_new_tokens": 512, "tools": [CALCULATOR], "max_turns": 2, "max_observation_tokens": 33},
            r"\(max_turns - 1\) \* max_observation_tokens of sum = 512 \+ 512 \+ 33 = 1057 tokens"
            r".*Set micro_batch_tokens=1057",
        ),
    ],
)
def test_wrong_options_of_a_task_are_refused_with_the_way_out(task: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(_merged(RL, "tasks", [TASK | task]), RLRun)


def test_options_of_a_task_decode_for_every_verb() -> None:
    for root, base in ((RLRun, RL), (SFTRun, SFT | {"max_answer_tokens": 64}), (EvalRun, EVAL)):
        task = msgspec.convert(_merged(base, "tasks", [WITH_TOOLS]), root).tasks[0]
        assert task.max_observed_tokens == 80
        assert (task.budget(64), task.list_tools, task.effort) == (64, True, "non-think")


@pytest.mark.parametrize(
    "columns",
    [{"question_column": "a", "answer_column": "a"}, {"messages_column": "question"}, {"messages_column": "answer"}],
)
def test_a_column_has_one_meaning(columns: dict[str, str]) -> None:
    task = {"type": "dataset", "name": "mine", "path": "a.jsonl", "reward": {"type": "exact"}}
    with pytest.raises(msgspec.ValidationError, match="Name two columns"):
        msgspec.convert(_merged(RL, "tasks", [task | columns]), RLRun)
