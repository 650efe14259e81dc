"""What `learners.Learners` starts: a process that has imported everything, and forks a learner's ranks when told to.

One line of JSON in starts ranks; out come {"pids": ...} and, when all have ended, {"codes": ..., "last_s": ...}.

A rank trains the tiny model as the product does (trainer, gradient tree, checkpoints by rl/checkpoints.py): it goes on
from the newest whole checkpoint, takes one after every step, and logs a hash of all weights after each.
"""

import hashlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollforward.conf.load import set_library_environment

set_library_environment()

import safetensors.torch  # noqa: E402 - the environment comes first
import torch  # noqa: E402

from rollforward.model import trainer_state  # noqa: E402
from rollforward.model.collectives import RankGroups  # noqa: E402
from rollforward.model.distributed import join_group  # noqa: E402
from rollforward.model.gradient_tree import subtree_bounds  # noqa: E402
from rollforward.model.scoring import ScoringBatch  # noqa: E402
from rollforward.model.train_config import BalanceConfig, HybridMuon  # noqa: E402
from rollforward.model.trainer import LossPart, Trainer  # noqa: E402
from rollforward.rl.checkpoints import CHECKPOINTS_NAME, LoopState, restore, save_checkpoint  # noqa: E402
from rollforward.rl.prompts import DataCursor  # noqa: E402

NUM_LEAVES = 5
"""Micro-batches of a step: on 4 ranks one of them has two."""

POINTS: dict[str, tuple[str, str]] = {
    "forward": ("rollforward.model.trainer", "target_logprobs"),
    "backward": ("rollforward.model.published", "PublishedWeights.take_gradients"),
    "round": ("rollforward.model.optim_hybrid", "stochastic_round_bf16"),
    "message": ("rollforward.model.collectives", "_send"),
    "reduce": ("rollforward.model.collectives", "RankGroups.tree_reduce_scatter"),
    "adamw": ("rollforward.model.optim_adamw", "DeepSpeedAdamW.step"),
    "orthogonalise": ("rollforward.model.optim_muon", "orthogonalise"),
    "publish": ("rollforward.model.published", "PublishedWeights.replace"),
    "save": ("rollforward.model.trainer_state", "save_file"),
    "sync": ("rollforward.rl.checkpoints", "_sync_tree"),
    "read back": ("rollforward.rl.checkpoints", "_validate"),
}
"""Where a rank may be told to kill itself, or all: before a call of this function. One more point is "byte", of which
`call` is the number of bytes that the rank has written of its checkpoint."""

STUCK_S = 60.0
"""Ranks that are alive so long after the first that ended are ended."""


def _arm(fault: Mapping[str, Any], is_due: Callable[[], bool]) -> None:
    """SIGKILL this rank, or all of them, at the fault's place while ``is_due``."""

    def kill() -> None:
        os.killpg(0, signal.SIGKILL) if fault["everyone"] else os.kill(os.getpid(), signal.SIGKILL)

    if fault["point"] == "byte":
        _die_at_byte(fault["call"], kill, is_due)
    else:
        _die_at_call(fault["point"], fault["call"], kill, is_due)


def _die_at_call(point: str, call: int, kill: Callable[[], None], is_due: Callable[[], bool]) -> None:
    """Kill at a call of the point, counted from 0."""
    module, path = POINTS[point]
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    left = [call]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if is_due():
            if left[0] == 0:
                kill()
            left[0] -= 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def _die_at_byte(position: int, kill: Callable[[], None], is_due: Callable[[], bool]) -> None:
    """Kill when so many bytes of this rank's checkpoint are written."""
    written = [0]

    def save_file(named: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
        data = safetensors.torch.save(named, metadata)
        end = position - written[0]
        with path.open("wb") as file:
            file.write(data[:end] if is_due() else data)
            file.flush()
            if is_due() and end <= len(data):
                kill()
        written[0] += len(data) if is_due() else 0

    trainer_state.save_file = save_file


def _leaf(step: int, index: int, vocab_size: int) -> ScoringBatch:
    generator = torch.Generator().manual_seed(1000 * step + index)
    lengths = (7 + index, 12)
    token_ids_T = torch.randint(2, vocab_size, (sum(lengths),), generator=generator)
    scored = torch.ones(token_ids_T.shape, dtype=torch.bool)
    scored[torch.tensor(lengths).cumsum(0) - 1] = False
    return ScoringBatch(
        token_ids_T=token_ids_T,
        sequence_lengths=lengths,
        target_ids_T=token_ids_T.roll(-1),
        scored_mask_T=scored,
        sequence_weights=(0.1, 0.1),
    )


def _hash(named: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(named):
        digest.update(name.encode())
        digest.update(named[name].detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _weights_hash(trainer: Trainer) -> str:
    """Of all masters, and of everything that is published. Collective."""
    packed = {
        f"published {name} {part}": tensor
        for name, one in trainer.published().items()
        for part, tensor in (("data", one.data), ("scale", one.scale))
        if tensor is not None
    }
    return _hash({**trainer.masters(), **packed})


def _save(root: Path, state: LoopState, trainer: Trainer, groups: RankGroups) -> None:
    """Rank 0 does what the controller does; the others write their part when the directory is there."""

    def write(directory: Path) -> None:
        groups.all_true(True)
        trainer.save(directory)
        groups.all_true(True)

    if groups.rank == 0:
        save_checkpoint(root, state, write, keep=2)
    else:
        write(root / f".step_{state.step:06d}.partial")
    groups.all_true(True)


def _rank(rank: int, order: dict[str, Any]) -> None:
    from rollforward.model.config import preset
    from tests.helpers.tiny import random_params

    torch.set_num_threads(1)
    join_group(Path(order["rendezvous"]), rank=rank, num_ranks=order["num_ranks"], timeout_s=STUCK_S)
    groups = RankGroups(1)
    config = preset("tiny")
    optim = HybridMuon(lr=2e-3, weight_decay=0.1, warmup_steps=3, max_grad_norm=0.5, zero_size=order["zero_size"])
    trainer = Trainer(
        config,
        random_params(config),
        precision="native",
        optim=optim,
        balance=BalanceConfig(bias_update_speed=1e-2, loss_weight=1e-2),
        seed=7,
    )
    root = Path(order["root"])
    checkpoints = root / CHECKPOINTS_NAME
    state = restore(checkpoints, trainer.load, LoopState(step=0, cursor=DataCursor(source="s", epoch=0, position=0)))
    fault = order["fault"]
    if fault is not None and fault["rank"] == rank:
        _arm(fault, lambda: state.step >= fault["step"])
    start, stop = subtree_bounds(NUM_LEAVES, order["num_ranks"])[rank]
    while state.step < order["steps"]:
        batches = [_leaf(state.step, index, config.vocab_size) for index in range(start, stop)]
        trainer.train_step(
            batches,
            lambda index, logprobs_T, _entropy_T: LossPart(loss=-logprobs_T.sum() * 1e-2, name=f"micro-batch {index}"),
            num_leaves=NUM_LEAVES,
        )
        state = LoopState(step=state.step + 1, cursor=DataCursor(source="s", epoch=0, position=state.step + 1))
        line = {"rank": rank, "step": state.step, "hash": _weights_hash(trainer)}
        with (root / f"weights-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        _save(checkpoints, state, trainer, groups)


def _fork(rank: int, order: dict[str, Any], group: int) -> int:
    """Ranks form one process group, led by the first, so that one signal reaches all."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, group)
            descriptor = os.open(Path(order["root"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            _rank(rank, order)
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _wait(pids: list[int]) -> dict[str, object]:
    codes: dict[int, int] = {}
    first_s: float | None = None
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            first_s = first_s or time.monotonic()
            continue
        if first_s is not None and time.monotonic() - first_s > STUCK_S:
            for left in set(pids) - set(codes):
                os.kill(left, signal.SIGKILL)
        time.sleep(0.005)
    return {"codes": [codes[pid] for pid in pids], "last_s": time.monotonic() - (first_s or 0.0)}


def _tell(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Starts the ranks of each order on standard input until it ends."""
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")  # seconds, which each rank would spend
    tests = sys.modules.setdefault("tests", types.ModuleType("tests"))
    tests.__path__ = [str(Path(__file__).parents[1])]
    torch.set_num_threads(1)
    for text in sys.stdin:
        order = json.loads(text)
        pids: list[int] = []
        for rank in range(order["num_ranks"]):
            pids.append(_fork(rank, order, pids[0] if pids else 0))
            os.setpgid(pids[-1], pids[0])
        _tell({"pids": pids})
        _tell(_wait(pids))


if __name__ == "__main__":
    main()
