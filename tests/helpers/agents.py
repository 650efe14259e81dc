"""A tiny engine whose completions keep real sandboxes: what reads calls out of the small model's turns, and how to run
it in this process or in one that is killed.

A small model writes no calls, so a turn's calls are read out of a hash of it; everything behind that is real. Each call
appends a line to a file and says how many there are, so that one that ran twice changes every later token.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollforward.model.config import ModelConfig
from rollforward.model.dsml import AssistantTurn, parse_turn
from rollforward.model.encoding import ChatEncoding
from rollforward.model.messages import ReasoningEffort
from rollforward.model.precision import PackedTensor, pack_published
from rollforward.model.shapes import param_specs
from rollforward.model.tokenizer import DSML, TokenizerConfig, train_tokenizer
from rollforward.rollout import replica as replica_module
from rollforward.rollout.agent_sessions import AgentSettings
from rollforward.rollout.agents import LocalAccess
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.environment import EnvironmentConfig, SandboxUse, TaskTools
from rollforward.rollout.replica import Replica
from rollforward.rollout.tool_environment import ToolEnvironment
from rollforward.rollout.types import Completion, Request, ToolUse
from rollforward.rollout.weights import publish_weights, version_directory
from rollforward.rollout.workspace import Workspace
from rollforward.sandbox.config import ContainerConfig, SandboxConfig, ToolConfig
from rollforward.sandbox.launch import LocalTransport
from tests.helpers.replicas import PROCESS, make_requests
from tests.helpers.tiny import random_params, tiny_config

WORKSPACE = Workspace(files={"seen.txt": b"begin\n"})
TOOLS = (ToolConfig(name="bash", timeout_s=30.0), ToolConfig(name="submit"))
USE = ToolUse(task="files", max_turns=4, max_observation_tokens=72, workspace=WORKSPACE.digest)
TASK = TaskTools(
    tools=TOOLS, max_observation_tokens=72, sandbox=SandboxUse(submission=("seen.txt", "answer.txt", "absent"))
)


def encoding() -> ChatEncoding:
    texts = ["<tool_result>1 2 3 4 5 6 7 8 9 0</tool_result>", "bash command submit answer", "error: begin seen"]
    return ChatEncoding(train_tokenizer(texts * 20, TokenizerConfig(vocab_size=384)))


def call_of(name: str, **arguments: str | float) -> str:
    parameters = "\n".join(
        f'<{DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{value}</{DSML}parameter>'
        for key, value in arguments.items()
    )
    return f'<{DSML}invoke name="{name}">\n{parameters}\n</{DSML}invoke>'


def written(*calls: str) -> str:
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(calls) + f"\n</{DSML}tool_calls>"


class CallingEncoding(ChatEncoding):
    """Reads turns as calls from a hash of their tokens: one or two of bash, a submission, a wrong call, or none."""

    delay_s = 0.0
    """What every call of bash takes."""

    def read_turn(
        self, token_ids: Sequence[int], effort: ReasoningEffort, *, is_call_begun: bool = False
    ) -> AssistantTurn:
        kind, first, second = hashlib.blake2b(np.array(token_ids).tobytes(), digest_size=3).digest()
        wait = f"sleep {self.delay_s}; " if self.delay_s else ""
        calls = [
            call_of("bash", command=f"echo {n} >> seen.txt; {wait}wc -l < seen.txt; ls /workspace | wc -l")
            for n in (first, second)
        ]
        texts = {0: "an answer", 1: written(call_of("submit", answer=f"{first}")), 2: written(call_of("bash"))}
        text = texts.get(kind % 8, written(*calls[: 1 + kind % 2]))
        return parse_turn(text, effort, is_call_begun=is_call_begun)


def model_config() -> ModelConfig:
    return msgspec.structs.replace(tiny_config(), vocab_size=encoding().tokenizer.vocab_size)


def packed() -> dict[str, PackedTensor]:
    """The end of a turn stands out among the tokens, or no turn would end."""
    config = model_config()
    params = random_params(config)
    params["head.weight"][encoding().tokenizer.eos_id] *= 16
    return {spec.name: pack_published(spec, params[spec.name]) for spec in param_specs(config)}


def publish(directory: Path) -> None:
    publish_weights(directory, 1, model_config(), packed())


def requests(members: int = 4) -> list[Request]:
    made = make_requests([3, 30], members=members, max_new_tokens=30, vocab_size=model_config().vocab_size, tools=USE)
    return [msgspec.structs.replace(one, workspace=WORKSPACE) for one in made]


def settings(run_dir: Path, supervisor: str, *, task: TaskTools = TASK, **container: Any) -> AgentSettings:
    config = ContainerConfig(**({"warm": 0, "trusted_code": True, "lease_s": 60.0} | container))
    return AgentSettings(
        run_dir=str(run_dir),
        tasks={"files": task},
        container=config,
        transports=(LocalTransport(supervisor, config),),
        sync=False,
    )


def build(config: EnvironmentConfig, *, owner: str, delay_s: float = 0.0) -> ToolEnvironment:
    """An environment that reads calls out of hashes."""
    reading = CallingEncoding(encoding().tokenizer)
    reading.delay_s = delay_s
    return ToolEnvironment(reading, config.tasks, {}, config.agents.connect(owner))


def open_replica(run_dir: Path, access: Any, *, task: TaskTools = TASK, delay_s: float = 0.0) -> Replica:
    """A replica of a run whose weights are published."""
    environment = EnvironmentConfig(model_dir="", tasks={"files": task}, sandbox=SandboxConfig(), agents=access)
    before, replica_module.build_environment = replica_module.build_environment, partial(build, delay_s=delay_s)  # type: ignore[assignment]
    try:
        replica = Replica(
            "engine-0",
            run_dir / "wal" / "engine-0",
            model_config(),
            precision="native",
            config=RolloutConfig(threads=1, wal=PROCESS),
            environment=environment,
        )
    finally:
        replica_module.build_environment = before
    replica.load_weights(version_directory(run_dir / "weights", 1))
    return replica


def sample(run_dir: Path, access: Any, *, members: int = 4, **named: Any) -> list[Completion]:
    replica = open_replica(run_dir, access, **named)
    try:
        return replica.generate(requests(members))
    finally:
        replica.close()


if __name__ == "__main__":  # a process to be killed: run directory, supervisor, delay
    sample(
        Path(sys.argv[1]), LocalAccess(settings=settings(Path(sys.argv[1]), sys.argv[2])), delay_s=float(sys.argv[3])
    )
