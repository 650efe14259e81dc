"""What every verb of this folder needs before it starts: tasks, tokenizer and model, checked before anything is
allocated."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollforward.conf import console
from rollforward.kernels.config import KernelBackends, check_precision
from rollforward.model.assignment import muon_assignments
from rollforward.model.backends import check_model, check_programs
from rollforward.model.checkpoint_headers import check_entries, load_checkpoint_config, scan_checkpoint
from rollforward.model.config import ModelConfig
from rollforward.model.encoding import ChatEncoding
from rollforward.model.encoding_version import ENCODING_FILE, LATER, EncodingVersion, find_encoding_version
from rollforward.model.errors import ConfigError
from rollforward.model.tokenizer import Tokenizer
from rollforward.model.train_config import HybridMuon, OptimConfig
from rollforward.rl.errors import ModelDirectoryError, TaskError
from rollforward.rl.judge.seats import JudgeModel, load_judges
from rollforward.rl.prompts import spread_examples, spread_limit
from rollforward.rl.sampling import PromptEncoder
from rollforward.rl.tasks.config import DatasetConfig, JudgeConfig, TaskConfig
from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.registry import build_tasks
from rollforward.rl.tasks.types import Split, Task
from rollforward.rollout.environment import EnvironmentConfig, SandboxUse, TaskTools
from rollforward.rollout.tool_environment import build_environment
from rollforward.rollout.weights import check_manifest
from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.images import HOST
from rollforward.sandbox.toolset import load_tool, tool_path


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Model and data of a run."""

    model_config: ModelConfig
    """The model's hyper-parameters."""
    encoding: ChatEncoding
    """Conversations to tokens."""
    encoder: PromptEncoder
    """Prompts to tokens, with the run's limit."""
    tasks: tuple[Task, ...]
    """What is asked."""
    environment: EnvironmentConfig | None
    """What answers turns in the replicas; None where no task has tools."""
    grader: Grader
    """Has the sandboxes of hidden tests, once somebody says where they are (`connect`); closed by whoever is done."""
    judges: tuple[JudgeModel, ...] = ()
    """Models that judge answers, the policy not counted."""

    @property
    def needs_sandboxes(self) -> bool:
        """Whether completions keep sandboxes, so that somebody must have them."""
        return any(task.options.keeps_sandbox for task in self.tasks)


class SettingNames(msgspec.Struct, frozen=True):
    """What a verb calls settings that errors name."""

    model_dir: str = "model_dir"
    max_new_tokens: str = "sampling.max_new_tokens"


def load_parts(
    model_dir: Path,
    task_configs: Sequence[TaskConfig],
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    sandbox: SandboxConfig,
    asks: Sequence[Split] = ("train", "heldout"),
    names: SettingNames = SettingNames(),  # noqa: B008 - frozen
) -> Parts:
    """Load what a run needs besides weights, of which the files' headers and, where there is a manifest, the hashes are
    checked. Tools are started once, to see that this machine can.

    Args:
        model_dir: checkpoint with its tokenizer.
        task_configs: what is asked.
        max_prompt_tokens: a longer prompt is an error. As many are looked at as cost seconds; what is beyond, when it
            is met.
        max_new_tokens: tokens that may be sampled after a prompt, where a task has no budget of its own.
        sandbox: where tools run.
        asks: questions that the run asks.
        names: of settings, for errors.

    Raises:
        ModelDirectoryError: there is none; tokenizer and model do not belong together, also those of a judge; or the
            model is too short for the limits.
        ConfigError, TokenizerError, CheckpointError: a file of the model directory is absent, unusable or changed.
        EncodingError: its encoding is not known, or does not know the effort of a task.
        TaskError: a task cannot be built as configured, its image has no name here, or a prompt is too long.
        ToolError, EnvironmentConfigError: a tool cannot be offered, or its task leaves no room for answers.
        SandboxUnavailableError: this machine cannot isolate tools.
    """
    if not model_dir.is_dir():
        raise ModelDirectoryError(
            f"{names.model_dir} is {model_dir}, where there is no directory; a model directory has config.json,"
            f" tokenizer.json and *.safetensors. Set {names.model_dir}=DIR"
        )
    check_judges(task_configs)
    config = load_checkpoint_config(model_dir)
    tokenizer = Tokenizer.load(model_dir)
    if tokenizer.vocab_size > config.vocab_size or tokenizer.eos_id != config.eos_token_id:
        raise ModelDirectoryError(
            f"{model_dir}: the tokenizer has {tokenizer.vocab_size} entries and ends with id"
            f" {tokenizer.eos_id}, the model has"
            f" vocab_size {config.vocab_size} and eos_token_id {config.eos_token_id}; they must belong together."
            " Take both from one checkpoint"
        )
    _check_positions(task_configs, config, model_dir, max_prompt_tokens, max_new_tokens, names)
    check_entries(scan_checkpoint(model_dir), config)
    check_manifest(model_dir, config)
    encoding = ChatEncoding(tokenizer, _encoding_version(model_dir))
    for task in task_configs:
        encoding.check_effort(task.effort)
    encoder = PromptEncoder(encoding, max_prompt_tokens=max_prompt_tokens)
    grader = Grader(sandbox.container)
    tasks = check_tasks(task_configs, sandbox, grader)
    _check_lengths(tasks, encoder, asks)
    judges = load_judges(task_configs, encoding, config)
    environment = _environment(model_dir, task_configs, sandbox)
    return Parts(
        model_config=config,
        encoding=encoding,
        encoder=encoder,
        tasks=tasks,
        environment=environment,
        grader=grader,
        judges=judges,
    )


def check_tasks(
    task_configs: Sequence[TaskConfig], sandbox: SandboxConfig, grader: Grader | None = None
) -> tuple[Task, ...]:
    """Build tasks, and refuse what can be known of them without a model. Arguments as in ``load_parts`` and
    ``build_tasks``.

    Raises:
        TaskError, ToolError: as in ``load_parts``.
    """
    for task in task_configs:
        _check_image(task, sandbox)
        for tool in task.tools:
            load_tool(tool)
    return build_tasks(task_configs, grader)


def check_judges(task_configs: Sequence[TaskConfig]) -> None:
    """Refuse judges whose model directories are not there.

    Raises:
        ModelDirectoryError: names the task and the setting.
    """
    for task in task_configs:
        for judge in task.judges:
            if not Path(judge.model_dir).is_dir():
                raise ModelDirectoryError(
                    f"task {task.name}: reward.judge.model_dir is {judge.model_dir}, where there is no directory; a"
                    " model that judges has one in the official layout. Correct it"
                )


def _check_positions(
    task_configs: Sequence[TaskConfig],
    config: ModelConfig,
    model_dir: Path,
    max_prompt_tokens: int,
    max_new_tokens: int,
    names: SettingNames,
) -> None:
    """Refuse sequences that are longer than the model's positions."""
    task = max(task_configs, key=lambda one: one.budget(max_new_tokens) + one.max_observed_tokens)
    observed = task.max_observed_tokens
    following = task.budget(max_new_tokens) + observed
    longest = max_prompt_tokens + following
    if longest <= config.max_position_embeddings:
        return
    sampled = names.max_new_tokens if task.max_new_tokens is None else f"max_new_tokens of task {task.name}"
    why, ways = "", f"max_prompt_tokens or {sampled}"
    if observed:
        why = (
            f": {following - observed} sampled and {observed} that tools of task {task.name} may say, its (max_turns -"
            " 1) * max_observation_tokens"
        )
        ways += ", or that task's max_turns or max_observation_tokens"
    raise ModelDirectoryError(
        f"max_prompt_tokens is {max_prompt_tokens} and {following} tokens may follow{why}; {longest} in all. The model"
        f" in {model_dir} has max_position_embeddings = {config.max_position_embeddings}. Lower {ways}"
    )


def _check_lengths(tasks: Sequence[Task], encoder: PromptEncoder, asks: Sequence[Split]) -> None:
    """Refuse questions that are too long; the rest of a large file is met later, which is said."""
    for task in tasks:
        for split in asks:
            for example in spread_examples(task, split):
                encoder.prompt_ids(example)
            if isinstance(task.options, DatasetConfig | JudgeConfig) and task.size(split) > spread_limit(task):
                console.say(
                    f"task {task.name}: {spread_limit(task)} of its {task.size(split)} {split} prompts, evenly spaced,"
                    " are within max_prompt_tokens; a longer one among the others stops the run when it is met"
                )


def _encoding_version(model_dir: Path) -> EncodingVersion:
    version = find_encoding_version(model_dir)
    if version is None:
        console.say(f"{model_dir} has no {ENCODING_FILE}: conversations are encoded as in {LATER.name} and later")
    return version or LATER


def check_kernels(kernels: KernelBackends, parts: Parts, model_dir: str, *, works_here: bool = True) -> None:
    """Refuse forms of ops that the run's model, or a model that judges, has no program for.

    Args:
        kernels: of the run, whose every process takes them.
        parts: of the run.
        model_dir: names its model in an error.
        works_here: whether all of its processes are on this machine, so that its programs are theirs.

    Raises:
        BackendError: names the key, the model and what to do.
    """
    for one in parts.judges:
        check_precision(kernels, one.judge.precision, f"judge {one.judge.model_dir}")
    models = [(parts.model_config, model_dir), *((one.model_config, one.name) for one in parts.judges)]
    for config, what in models:
        check_model(kernels, config, what)
        if works_here:
            check_programs(kernels, config, what)


def check_learner(config: ModelConfig, optim: OptimConfig, learner_ranks: int) -> None:
    """Refuse ranks over which Muon's whole matrices cannot be distributed.

    Args:
        config: the model.
        optim: AdamW fits any ranks.
        learner_ranks: of the learner.

    Raises:
        ConfigError: names matrix or number, and settings that fit.
    """
    if not isinstance(optim, HybridMuon):
        return
    try:
        muon_assignments(config, optim, learner_ranks)
    except ConfigError as error:
        raise ConfigError(
            f"{error} In a run these are optim.zero_size, cluster.learner_ranks and optim.max_padding"
        ) from error


def _environment(
    model_dir: Path, task_configs: Sequence[TaskConfig], sandbox: SandboxConfig
) -> EnvironmentConfig | None:
    tools = {
        task.name: TaskTools(
            tools=tuple(_located(tool) for tool in task.tools),
            effort=task.effort,
            max_observation_tokens=task.max_observation_tokens,
            max_calls_per_turn=task.max_calls_per_turn,
            sandbox=_sandbox_use(task),
        )
        for task in task_configs
        if task.tools
    }
    if not tools:
        return None
    config = EnvironmentConfig(model_dir=str(model_dir.resolve()), tasks=tools, sandbox=sandbox)
    one_worker = msgspec.structs.replace(config, sandbox=msgspec.structs.replace(sandbox, workers=1))
    build_environment(one_worker).close()
    return config


def _check_image(task: TaskConfig, sandbox: SandboxConfig) -> None:
    known = sorted({HOST, *sandbox.container.images})
    if task.keeps_sandbox and task.image not in known:
        raise TaskError(
            f"task {task.name}: image is {task.image!r}; there are {', '.join(known)}. Name one of them, or add it to"
            " sandbox.container.images"
        )


def _sandbox_use(task: TaskConfig) -> SandboxUse | None:
    if not task.keeps_sandbox:
        return None
    return SandboxUse(
        substrate=task.kept_substrate,
        submission=task.submission,
        max_submission_bytes=task.max_submission_bytes,
        max_tool_s=task.max_tool_s,
    )


def _located(tool: ToolConfig) -> ToolConfig:
    """The tool with an absolute path: replicas need not work in this process's directory."""
    return tool if tool.file is None else msgspec.structs.replace(tool, file=str(tool_path(tool).resolve()))
