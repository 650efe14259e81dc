"""The schema of runs: the roots that `train`, `sft` and `eval` decode into.

Schemas of parts live beside what they configure (`rollout/config.py`, `model/train_config.py`, `rl/algorithms.py`,
`rl/tasks/config.py`)
and are assembled only here. No torch and no ray: a wrong key must cost milliseconds. YAML and Hydra are in `conf/`.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from rollforward.kernels.config import KernelBackends, check_no_teachers, check_precision, check_sizes
from rollforward.model.config import PresetName, preset
from rollforward.model.tokenizer import TokenizerConfig
from rollforward.model.train_config import BalanceConfig, HybridMuon, OptimConfig, Precision
from rollforward.rl.algorithms import Algorithm
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.types import SamplingParams
from rollforward.sandbox.config import SandboxConfig

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0.0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0.0)]
Resources = dict[str, Annotated[float, msgspec.Meta(gt=0.0)]]


class FreshModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="fresh"):
    """An untrained model with a tokenizer trained on the tasks' own conversations."""

    preset: PresetName = "tiny"
    """Hyper-parameters; the vocabulary size is the tokenizer's."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How the tokenizer is trained."""
    seed: NonNegativeInt = 0
    """Chooses the weights."""


class CheckpointModel(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="checkpoint"
):
    """A model directory in the official layout, with its tokenizer.json."""

    model_dir: str
    """Where it lies."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Ray works, and what it may use there."""

    may_change: ClassVar[frozenset[str]] = frozenset(
        {
            "address",
            "num_cpus",
            "learner_ranks",
            "replica_resources",
            "learner_resources",
            "learner_heartbeat_timeout_s",
            "rank_timeout_s",
        }
    )
    """Fields that may differ when a run directory goes on: nothing that is computed depends on them."""

    address: str | None = None
    """A running cluster, as `ray.init` takes it ("auto", "HEAD:6379"). null is the cluster of the Ray job that this
    process is the driver of, and otherwise a local one, which is started and ends with the run. One of its nodes must
    be on this machine, and all must see run_dir; the source tree here, if it is one, is sent to them."""
    num_cpus: PositiveInt = 2
    """Cores of the local cluster that is started."""
    replica_resources: Resources = {}
    """Ray resources that a replica's node must have free, and so where replicas may be: {rollout: 1} is for nodes that
    were started with `--resources='{"rollout": 1}'`. None: any node. Only for a cluster that is joined."""
    learner_resources: Resources = {}
    """The same for each rank of the learner."""
    learner_ranks: PositiveInt = 1
    """Data-parallel ranks of the learner, one process each; they share the micro-batches of a step. A power of two."""
    learner_threads: PositiveInt = 2
    """CPU threads of a rank; it computes while the engines wait. A run keeps them: torch divides the sum of a large
    tensor by threads, and its last bit with it."""
    learner_heartbeat_timeout_s: PositiveSeconds = 60.0
    """Seconds without a sign of life from a rank, while it is waited for, after which it is killed and the run ends
    with its name. Longer than a machine that is only busy keeps it from answering."""
    rank_timeout_s: PositiveSeconds = 1800.0
    """Seconds that a rank waits in a collective operation for another that gives signs of life but does not come; then
    the run ends. Longer than one rank's pass over its micro-batches takes."""

    def __post_init__(self) -> None:
        """Refuse what cannot be joined."""
        if self.address is not None and "://" in self.address:
            raise ValueError(
                f"cluster.address is {self.address}; the run needs a node of the cluster on this machine, and no proxy."
                " Set HEAD:6379 there, or give the run to the cluster with `rollforward submit`"
            )


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation on held-out prompts during a run; also before the first and after the last step."""

    prompts: PositiveInt = 200
    """Held-out prompts of each task."""
    every_steps: PositiveInt = 20
    """Steps between evaluations."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""

    def __post_init__(self) -> None:
        """Refuse a temperature that no completion can be drawn with."""
        SamplingParams(max_new_tokens=1, temperature=self.temperature)


class TrackerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases; metrics.jsonl in the run directory is always written."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """"offline" writes files to be synced later and needs no account."""
    project: str = "rollforward"
    """Project of the run."""
    answers_every_steps: PositiveInt | None = None
    """(`train`) Steps between those of which a few sampled answers are kept to be read, in answers.jsonl and as a table
    of W&B. null is `eval.every_steps`."""


class LoopRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `train` and `distill` share: the loop that samples, learns and publishes."""

    run_dir: str
    """Directory of the run: log, checkpoints, metrics."""
    model_dir: str
    """Checkpoint to start from, in the official layout; in `train` also the reference of the KL."""
    tasks: tuple[TaskConfig, ...]
    """What to learn; at least one."""
    optim: OptimConfig
    """The optimizer."""
    sampling: SamplingParams
    """How training completions are drawn."""
    steps: PositiveInt
    """Optimizer steps of the run."""
    prompts_per_step: PositiveInt
    """Prompts of a step; each is attempted `algo.group_size` times, in `distill` `samples_per_prompt` times."""
    micro_batch_tokens: PositiveInt
    """Tokens, prompts included, of one forward and backward pass. Changes memory and speed only."""
    max_prompt_tokens: PositiveInt = 512
    """A longer rendered prompt is an error."""
    seed: NonNegativeInt = 0
    """Chooses the order of prompts and every draw."""
    precision: Precision = "native"
    """Number formats of the forward pass, on both sides alike."""
    kernels: KernelBackends = KernelBackends()
    """Which ops run as TileLang kernels on a GPU."""
    balance: BalanceConfig = BalanceConfig()
    """Balancing of experts; only without `keep_routing` (`algo.keep_routing`), whose routes are not the router's
    choice."""
    recompute: bool = False
    """Keep only the layers' inputs in the forward pass and compute each layer again for the backward pass: less memory,
    about a third more work, the same bits."""
    cluster: ClusterConfig = ClusterConfig()
    """Cores and threads."""
    rollout: RolloutConfig = RolloutConfig()
    """Engines and their log."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the tasks' tools run."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    checkpoint_every_steps: PositiveInt = 20
    """Steps between checkpoints that a restarted run continues from."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept."""
    keep_samples: bool = False
    """Keep the Arrow files of every step (`run_dir/samples`) for analysis; false unlinks those that a checkpoint
    covers."""
    tracker: TrackerConfig = TrackerConfig()
    """Where metrics go."""

    def __post_init__(self) -> None:
        """Refuse combinations that would fail, or be silently wrong, only later."""
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0; members of a group would all be the same greedy answer. Set"
                " sampling.temperature=1"
            )
        check_precision(self.kernels, self.precision)
        _check_sequences_fit(self.tasks, self.max_prompt_tokens, self.sampling.max_new_tokens, self.micro_batch_tokens)
        _check_ranks(self.cluster.learner_ranks, self.optim)
        _check_schedule(self.optim, self.steps)
        _check_heldout(self.tasks, self.eval.prompts, "eval.prompts")


class RLRun(LoopRun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of `train`: reinforcement learning from a checkpoint."""

    algo: Algorithm
    """The algorithm and its constants."""
    shuffle_rewards: bool = False
    """The negative control: rewards are permuted within each step, keyed by seed and step, so that nothing can be
    learned from them. A run that gets better all the same measures something else than it says.
    """

    def __post_init__(self) -> None:
        """Refuse combinations that would fail, or be silently wrong, only later."""
        super().__post_init__()
        check_no_teachers(self.kernels, "train")
        if self.balance.is_on and self.algo.keep_routing:
            raise ValueError(
                "balance is on and algo.keep_routing is true; replayed routes are not what the router chooses now, so"
                " neither their loads nor a loss on them mean anything. Set algo.keep_routing=false, or"
                " balance.bias_update_speed=0 and balance.loss_weight=0"
            )


class SFTRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of `sft`: supervised fine-tuning on rendered conversations of the tasks, every right answer a target."""

    run_dir: str
    """Directory of the run: checkpoints, metrics, the model at the end."""
    start: FreshModel | CheckpointModel
    """Weights and tokenizer to start from."""
    tasks: tuple[TaskConfig, ...]
    """What to learn; at least one. Each needs right answers."""
    optim: OptimConfig
    """The optimizer."""
    steps: PositiveInt
    """Optimizer steps of the run."""
    micro_batch_tokens: PositiveInt
    """Tokens of one forward and backward pass, whole conversations."""
    micro_batches_per_step: PositiveInt = 1
    """Micro-batches whose gradients are added before an optimizer step."""
    max_prompt_tokens: PositiveInt = 512
    """A longer rendered prompt is an error."""
    max_answer_tokens: PositiveInt = 512
    """A longer rendered answer is an error; also the budget of evaluation."""
    seed: NonNegativeInt = 0
    """Chooses the order of conversations."""
    precision: Precision = "native"
    """Number formats of the forward pass."""
    kernels: KernelBackends = KernelBackends()
    """Which ops run as TileLang kernels on a GPU."""
    balance: BalanceConfig = BalanceConfig()
    """Balancing of experts."""
    recompute: bool = False
    """Keep only the layers' inputs in the forward pass and compute each layer again for the backward pass: less memory,
    about a third more work, the same bits."""
    rollout: RolloutConfig = RolloutConfig()
    """The engine that evaluates; its `threads` hold for training too, which shares its process."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the tasks' tools run in evaluations."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    checkpoint_every_steps: PositiveInt = 100
    """Steps between checkpoints that a restarted run continues from."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept."""
    tracker: TrackerConfig = TrackerConfig()
    """Where metrics go."""

    def __post_init__(self) -> None:
        """Refuse combinations that would fail only later."""
        check_precision(self.kernels, self.precision)
        check_no_teachers(self.kernels, "sft")
        if isinstance(self.start, FreshModel):
            sizes = preset(self.start.preset)
            check_sizes(
                self.kernels,
                f"start.preset={self.start.preset}",
                vocab_size=self.start.tokenizer.vocab_size,
                hidden_size=sizes.hidden_size,
                expert_width=sizes.moe_intermediate_size,
                num_streams=sizes.hc_mult,
            )
        _check_sequences_fit(
            self.tasks,
            self.max_prompt_tokens,
            self.max_answer_tokens,
            self.micro_batch_tokens,
            answer_key="max_answer_tokens",
        )
        _check_one_engine(self.rollout, "sft evaluates")
        _check_ranks(1, self.optim)
        _check_schedule(self.optim, self.steps)
        _check_heldout(self.tasks, self.eval.prompts, "eval.prompts")


class EvalRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of `eval`: accuracy of one checkpoint on held-out prompts."""

    run_dir: str
    """Directory of the run: log, samples, metrics."""
    model_dir: str
    """Checkpoint to measure, in the official layout."""
    tasks: tuple[TaskConfig, ...]
    """What to measure on; at least one."""
    sampling: SamplingParams
    """How completions are drawn; temperature 0 is greedy."""
    prompts: PositiveInt = 200
    """Held-out prompts of each task."""
    max_prompt_tokens: PositiveInt = 512
    """A longer rendered prompt is an error."""
    seed: NonNegativeInt = 0
    """Keys every draw; without effect where temperature is 0."""
    precision: Precision = "native"
    """Number formats of the forward pass."""
    kernels: KernelBackends = KernelBackends()
    """Which ops run as TileLang kernels on a GPU."""
    rollout: RolloutConfig = RolloutConfig()
    """Engines and their log."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the tasks' tools run."""

    def __post_init__(self) -> None:
        """Refuse combinations that would fail only later."""
        check_precision(self.kernels, self.precision)
        check_no_teachers(self.kernels, "eval")
        _check_one_engine(self.rollout, "eval samples")
        _check_heldout(self.tasks, self.prompts, "prompts")


def _check_ranks(learner_ranks: int, optim: OptimConfig) -> None:
    if learner_ranks & (learner_ranks - 1):
        raise ValueError(
            f"cluster.learner_ranks is {learner_ranks}; gradients are added in a binary tree of which each rank owns a"
            f" subtree. Set a power of two, such as cluster.learner_ranks={1 << (learner_ranks.bit_length() - 1)}"
        )
    zero_size = optim.zero_size if isinstance(optim, HybridMuon) else None
    if zero_size is not None and (zero_size & (zero_size - 1) or learner_ranks % zero_size):
        raise ValueError(
            f"optim.zero_size is {zero_size}; it must be a power of two that divides the learner's {learner_ranks}"
            f" ranks. Set optim.zero_size={learner_ranks}, or leave it out"
        )


def _check_one_engine(rollout: RolloutConfig, what: str) -> None:
    if rollout.engines != 1:
        raise ValueError(
            f"rollout.engines is {rollout.engines}; {what} with one engine in its own process. Set rollout.engines=1"
        )


def _check_sequences_fit(
    tasks: tuple[TaskConfig, ...],
    prompt_tokens: int,
    answer_tokens: int,
    micro_batch_tokens: int,
    answer_key: str = "sampling.max_new_tokens",
) -> None:
    for task in tasks:
        budget, observed = task.budget(answer_tokens), task.max_observed_tokens
        task.check_length_penalty(budget)
        longest = prompt_tokens + budget + observed
        if longest <= micro_batch_tokens:
            continue
        names = f"max_prompt_tokens + {answer_key if task.max_new_tokens is None else f'max_new_tokens of {task.name}'}"
        sums = f"{prompt_tokens} + {budget}"
        if observed:
            names += f" + (max_turns - 1) * max_observation_tokens of {task.name}"
            sums += f" + {observed}"
        raise ValueError(
            f"micro_batch_tokens is {micro_batch_tokens}, but a sequence may have {names} = {sums} = {longest} tokens"
            f" and is never divided. Set micro_batch_tokens={longest} or more, or lower one of the others"
        )


def _check_schedule(optim: OptimConfig, steps: int) -> None:
    if optim.warmup_steps > steps:
        raise ValueError(
            f"optim.warmup_steps is {optim.warmup_steps}, but the run has {steps} steps and would never reach"
            f" optim.lr. Set optim.warmup_steps={steps} or fewer"
        )
    last = optim.warmup_steps + optim.decay_steps
    if optim.decay_steps > 0 and last < steps:
        raise ValueError(
            f"optim.decay_steps is {optim.decay_steps} after {optim.warmup_steps} of warm-up, but the run has {steps}"
            f" steps, of which the last {steps - last} would change nothing. Set"
            f" optim.decay_steps={steps - optim.warmup_steps} or more, or 0"
        )


def _check_heldout(tasks: tuple[TaskConfig, ...], prompts: int, key: str) -> None:
    if not tasks:
        raise ValueError("tasks is empty; a run needs at least one task. Choose a recipe or set tasks")
    for task in tasks:
        if prompts > task.heldout_size:
            raise ValueError(
                f"{key} is {prompts}, but task {task.name} keeps {task.heldout_size} held-out prompts, and none is"
                f" asked twice. Set {key}={task.heldout_size} or fewer, or raise the task's heldout_size"
            )
