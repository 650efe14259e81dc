"""Proves: a step's shards are there whole or not at all, through kills and full disks; only what is right is used
again; nothing is written beyond the bound, and nothing stays behind.

A single file, its damage included, is in test_hidden_shard.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.distill.errors import HiddenCacheError
from rollforward.distill.hidden_cache import HIDDEN_NAME, HiddenCache, expected_bytes
from rollforward.distill.hidden_shard import ShardKey
from rollforward.rollout.types import RequestId
from rollforward.sandbox.bubblewrap import find_bubblewrap
from tests.helpers.source import ROOT

STEP = 7
TEACHERS = ("code", "math", "math")


def key_of(index: int, step: int = STEP, **changes: Any) -> ShardKey:
    """The key of a plan: each of other trajectories, and one of a wider teacher."""
    key = ShardKey(
        teacher=TEACHERS[index],
        teacher_version=f"version of {TEACHERS[index]}",
        policy_version=step,
        precision="native",
        trajectories=(RequestId(step, index, 0), RequestId(step, index, 1)),
        tokens_checksum=100 * step + index,
        num_rows=4 + index,
        width=8 if TEACHERS[index] == "math" else 16,
    )
    return msgspec.structs.replace(key, **changes)


KEYS = [key_of(index) for index in range(3)]


def values_of(key: ShardKey) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(key.tokens_checksum)
    hidden_RE = torch.randn(key.num_rows, key.width, generator=generator).bfloat16()
    return hidden_RE, -torch.rand(key.num_rows, generator=generator)


def fill(cache: HiddenCache, keys: list[ShardKey], step: int = STEP) -> int:
    return sum(cache.write(step, index, key, *values_of(key)) for index, key in enumerate(keys))


def check(cache: HiddenCache, keys: list[ShardKey], step: int = STEP) -> None:
    """Every shard is there and right."""
    for index, key in enumerate(keys):
        assert cache.finding(step, index, key) is None
        shard = cache.read(step, index, key)
        hidden_RE, logprobs_R = values_of(key)
        assert torch.equal(shard.hidden_RE, hidden_RE)
        assert torch.equal(shard.teacher_logprobs_R, logprobs_R)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / HIDDEN_NAME


@pytest.fixture
def cache(root: Path) -> HiddenCache:
    return HiddenCache(root, max_bytes=1 << 20)


def everything(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


NAMES = [
    "step_000007",
    "step_000007/0000-code.arrow",
    "step_000007/0001-math.arrow",
    "step_000007/0002-math.arrow",
]


def test_a_step_from_its_begin_to_its_end(cache: HiddenCache, root: Path) -> None:
    assert not root.exists()
    assert cache.begin(STEP, KEYS) == ([0, 1, 2], [])
    num_bytes = fill(cache, KEYS)
    assert everything(root) == NAMES
    assert cache.path(STEP, 1, "math") == root / NAMES[2]
    assert num_bytes == sum((root / name).stat().st_size for name in NAMES[1:])
    assert num_bytes <= expected_bytes(KEYS) <= num_bytes + 3 * 2048
    check(cache, KEYS)
    # Another process, after a restart.
    again = HiddenCache(root, max_bytes=1 << 20)
    assert again.begin(STEP, KEYS) == ([], [])
    check(again, KEYS)
    shard = again.read(STEP, 2, KEYS[2])
    again.free(STEP)
    assert everything(root) == []
    assert torch.equal(shard.hidden_RE, values_of(KEYS[2])[0])
    again.free(STEP)


def test_a_shard_may_be_written_without_begin(cache: HiddenCache) -> None:
    fill(cache, KEYS)
    check(cache, KEYS)


# What an earlier process left


def test_only_what_is_not_right_is_computed_again(cache: HiddenCache, root: Path) -> None:
    fill(cache, KEYS)
    for name in NAMES[2:]:
        (root / name).unlink()
    (root / NAMES[2]).write_bytes(b"torn")
    missing, sentences = cache.begin(STEP, KEYS)
    assert missing == [1, 2]
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{root / NAMES[2]} is damaged: ")
    assert everything(root) == NAMES[:2]
    for index in missing:
        cache.write(STEP, index, KEYS[index], *values_of(KEYS[index]))
    check(cache, KEYS)


def _swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)


def test_shards_of_two_teachers_are_told_apart(cache: HiddenCache, root: Path) -> None:
    fill(cache, KEYS)
    _swap(root / NAMES[1], root / NAMES[2])
    with pytest.raises(HiddenCacheError, match=r"0000-code.arrow is foreign: it is of teacher math .* same run_dir"):
        cache.read(STEP, 0, KEYS[0])
    assert cache.begin(STEP, KEYS)[0] == [0, 1]


def test_shards_of_two_plans_of_one_teacher_are_told_apart(cache: HiddenCache, root: Path) -> None:
    fill(cache, KEYS)
    _swap(root / NAMES[2], root / NAMES[3])
    with pytest.raises(HiddenCacheError, match=r"0001-math.arrow is stale: .*s7-p2-m0 .*, not of .* s7-p1-m0"):
        cache.read(STEP, 1, KEYS[1])


def test_shards_of_two_steps_are_told_apart(cache: HiddenCache, root: Path) -> None:
    fill(cache, KEYS)
    same_version = [key_of(index, step=8, policy_version=7) for index in range(3)]
    (root / "step_000007").rename(root / "step_000008")
    for index, key in enumerate(same_version):
        with pytest.raises(HiddenCacheError, match=r"is stale: .* s7-p\d-m0 .*, not of .* s8-p\d-m0"):
            cache.read(8, index, key)
    missing, sentences = cache.begin(8, same_version)
    assert (missing, len(sentences), everything(root)) == ([0, 1, 2], 3, ["step_000008"])


def test_another_policy_or_teacher_of_the_same_name_is_told_apart(cache: HiddenCache) -> None:
    fill(cache, KEYS)
    resampled = [msgspec.structs.replace(key, policy_version=8) for key in KEYS]
    with pytest.raises(HiddenCacheError, match="is stale: it is of policy version 7, not of policy version 8"):
        cache.read(STEP, 0, resampled[0])
    replaced = [*KEYS[:2], msgspec.structs.replace(KEYS[2], teacher_version="a better one")]
    reason = cache.finding(STEP, 2, replaced[2])
    assert reason is not None
    assert (
        "is foreign: it is of teacher math in version version of math, not of teacher math in version a bett" in reason
    )
    assert cache.begin(STEP, replaced) == ([2], [reason])
    assert cache.begin(STEP, resampled)[0] == [0, 1, 2]


def test_what_is_absent_is_named_with_the_way_out(cache: HiddenCache, root: Path) -> None:
    for _ in range(2):
        assert cache.finding(STEP, 1, KEYS[1]) == f"{root / NAMES[2]} is absent"
        with pytest.raises(
            HiddenCacheError, match=r"0001-math.arrow is absent\. Start the run again with the same run_"
        ):
            cache.read(STEP, 1, KEYS[1])
        cache.begin(STEP, KEYS)


def test_a_step_begins_with_its_own_shards_alone(cache: HiddenCache, root: Path) -> None:
    for step in (6, 7, 8, 1_234_567):
        keys = [key_of(index, step=step) for index in range(3)]
        fill(cache, keys, step)
    inside = root / "step_000007"
    (inside / ".0001-math.arrow.partial").write_bytes(b"half")
    (inside / "0003-math.arrow").write_bytes((root / NAMES[3]).read_bytes())
    (inside / "0001-code.arrow").mkdir()
    (inside / "0001-code.arrow" / "deep").write_bytes(b"")
    os.mkfifo(inside / "pipe")
    (root / "step_x").write_bytes(b"")
    (root / "step_000009").symlink_to(inside)
    (root / "notes").mkdir()
    assert cache.begin(STEP, KEYS) == ([], [])
    later = [name.replace("step_000007", step) for step in ("step_000008", "step_1234567") for name in NAMES]
    assert sorted(everything(root)) == sorted(["notes", *NAMES, *later])
    check(cache, KEYS)


def test_what_a_run_had_reached_before_it_went_back_to_a_checkpoint_stays_while_there_is_room(root: Path) -> None:
    ahead = [key_of(index, step=9) for index in range(3)]
    room = expected_bytes(KEYS) + expected_bytes(ahead)
    roomy = HiddenCache(root, max_bytes=room)
    fill(roomy, ahead, 9)
    assert roomy.begin(STEP, KEYS) == ([0, 1, 2], [])
    fill(roomy, KEYS)
    roomy.free(STEP)
    assert roomy.begin(9, ahead) == ([], []), "not computed again"
    narrow = HiddenCache(root, max_bytes=expected_bytes(KEYS) + 100)
    assert narrow.begin(STEP, KEYS) == ([0, 1, 2], [])
    assert everything(root) == [NAMES[0]], "they would exceed the bound together"


@pytest.mark.parametrize("kind", ["file", "fifo", "link", "dangling"])
def test_what_is_no_directory_makes_room_for_one(cache: HiddenCache, root: Path, kind: str) -> None:
    fill(cache, KEYS)
    place, elsewhere = root / "step_000007", root.parent / "elsewhere"
    place.rename(elsewhere)
    if kind == "file":
        place.write_bytes(b"")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(elsewhere if kind == "link" else "nowhere")
    assert cache.begin(STEP, KEYS) == ([0, 1, 2], [])
    fill(cache, KEYS)
    check(cache, KEYS)
    assert len(list(elsewhere.iterdir())) == 3, "of a link the link alone goes"


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_what_is_no_file_makes_room_for_one(cache: HiddenCache, root: Path, kind: str, is_begun: bool) -> None:
    fill(cache, KEYS)
    place, elsewhere = root / NAMES[2], root.parent / "elsewhere"
    place.rename(elsewhere)
    if kind == "directory":
        place.mkdir()
        (place / "deep").write_bytes(b"")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(elsewhere)
    with pytest.raises(HiddenCacheError, match=r"0001-math.arrow is damaged: .*same run_dir"):
        cache.read(STEP, 1, KEYS[1])
    if is_begun:
        missing, sentences = cache.begin(STEP, KEYS)
        assert (missing, len(sentences)) == ([1], 1)
    before = elsewhere.read_bytes()
    other = msgspec.structs.replace(KEYS[1], policy_version=9)
    cache.write(STEP, 1, other, *values_of(other))
    check(cache, [KEYS[0], other, KEYS[2]])
    assert elsewhere.read_bytes() == before, "nothing is written through a link"


# Room


def test_shards_beyond_the_bound_are_refused_before_anything_is_touched(cache: HiddenCache, root: Path) -> None:
    fill(cache, [key_of(0, step=6)], 6)
    left = everything(root)
    exactly = expected_bytes(KEYS)
    small = HiddenCache(root, max_bytes=exactly - 1)
    with pytest.raises(
        HiddenCacheError, match=r"step 7: .* GiB; teacher_cache.max_hidden_gib allows .* Raise it, or low"
    ):
        small.begin(STEP, KEYS)
    assert everything(root) == left
    assert HiddenCache(root, max_bytes=exactly).begin(STEP, KEYS) == ([0, 1, 2], [])
    # What is there already is within the bound too.
    fill(cache, KEYS)
    with pytest.raises(HiddenCacheError, match="max_hidden_gib"):
        small.begin(STEP, KEYS)
    check(cache, KEYS)


def test_shards_beyond_the_disk_are_refused_before_anything_is_written(root: Path) -> None:
    free = shutil.disk_usage(root.parent.parent).free
    huge = key_of(1, num_rows=free // 16, tokens_checksum=0)
    cache = HiddenCache(root, max_bytes=1 << 80)
    with pytest.raises(HiddenCacheError, match=r"step 7: .* GiB; the disk of .* has .* free\. Make room, or lower"):
        cache.begin(STEP, [KEYS[0], huge])
    assert not root.exists()
    # What is there already needs no more room.
    fill(cache, KEYS)
    with pytest.raises(HiddenCacheError, match="free"):
        cache.begin(STEP, [*KEYS, huge])
    check(cache, KEYS)


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = HiddenCache(tmp_path / "file", max_bytes=1 << 20)
    with pytest.raises(
        HiddenCacheError, match=r"step_000007 cannot be made ready: .*Move away what stands there, .* goes on"
    ):
        cache.begin(STEP, KEYS)
    with pytest.raises(
        HiddenCacheError, match=r"0000-code.arrow cannot be written: .*Move away what stands there, .* goes on"
    ):
        cache.write(STEP, 0, KEYS[0], *values_of(KEYS[0]))
    with pytest.raises(HiddenCacheError, match=r"0000-code.arrow is damaged: "):
        cache.read(STEP, 0, KEYS[0])


DISK = """
import sys
from pathlib import Path
from rollforward.distill.errors import HiddenCacheError
from rollforward.distill.hidden_cache import HiddenCache
from tests.distill.test_hidden_cache import KEYS, key_of, values_of
cache = HiddenCache(Path(sys.argv[1]), max_bytes=1 << 40)
half, large = key_of(1, num_rows=2000), key_of(1, num_rows=100_000)
def attempt(work):
    try:
        sys.stderr.write(f"done {work()}\\n")
    except HiddenCacheError as error:
        sys.stderr.write(f"{error}\\n")
attempt(lambda: cache.begin(7, KEYS))
attempt(lambda: cache.write(7, 0, KEYS[0], *values_of(KEYS[0])))
attempt(lambda: cache.write(7, 2, large, *values_of(large)))
attempt(lambda: cache.write(7, 1, KEYS[1], *values_of(KEYS[1])))
attempt(lambda: cache.begin(7, KEYS))
attempt(lambda: cache.begin(7, [KEYS[0], large]))
attempt(lambda: cache.free(7))
attempt(lambda: cache.write(7, 0, half, *values_of(half)))
attempt(lambda: cache.begin(7, [half]))
attempt(lambda: cache.begin(7, [half, half]))
attempt(lambda: cache.begin(8, []))
sys.stderr.write(" ".join(sorted(path.name for path in Path(sys.argv[1]).rglob("*"))) + "\\n")
"""


def _on_disk(directory: Path, *mount: str) -> list[str]:
    """What the script says where a directory is a disk of its own."""
    command = [find_bubblewrap(), "--dev-bind", "/", "/", *mount, sys.executable, "-c", DISK, str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stderr.splitlines()


def test_a_full_disk_is_named_and_not_kept_full(tmp_path: Path) -> None:
    """A tmpfs of 64 KiB; the large shard takes 2 MB, the half one 40 KB."""
    begun, first, full, second, again, larger, freed, half, there, twice, after, left = _on_disk(
        tmp_path, "--size", str(1 << 16), "--tmpfs", str(tmp_path)
    )
    assert begun == "done ([0, 1, 2], [])"
    assert first.startswith("done ")
    assert "0002-math.arrow cannot be written: [Errno 28]" in full, full
    assert "Make room on its disk, or lower" in full
    assert second.startswith("done "), "nothing is left of what did not fit"
    assert again == "done ([2], [])"
    assert "step 7: hidden vectors of teachers take" in larger, larger
    assert "free. Make room" in larger
    assert freed == "done None"
    assert half.startswith("done ")
    assert there == "done ([], [])", "what is there needs no more room"
    assert "free. Make room" in twice, twice
    assert (after, left) == ("done ([], [])", "step_000008")


def test_a_disk_that_takes_nothing_is_named(cache: HiddenCache, root: Path) -> None:
    fill(cache, [key_of(0)])
    begun, first, _, _, _, _, freed, *_, after, left = _on_disk(root, "--ro-bind", str(root), str(root))
    assert begun == "done ([1, 2], [])", "what is there needs no writing"
    for line, what in ((first, "0000-code.arrow cannot be written"), (freed, "step_000007 cannot be removed")):
        assert f"{what}: [Errno 30]" in line, line
        assert line.endswith(
            "Let this user write there, or name another place; the same command with the same run_dir goes on"
        )
    assert left == "0000-code.arrow step_000007"
    assert "step_000008 cannot be made ready: [Errno 30]" in after


# Death

LIVES = """
import os, random, signal, sys, time
from pathlib import Path
import msgspec
from rollforward.distill.hidden_cache import HiddenCache
from tests.distill.test_hidden_cache import STEP, key_of, values_of
cache, random = HiddenCache(Path(sys.argv[1]), max_bytes=1 << 40), random.Random(0)
partial = rewritten = whole_s = 0
for life in range(-1, 30):
    keys = [key_of(index, num_rows=20_000 + life, tokens_checksum=life + 1) for index in range(3)]
    values = [values_of(key) for key in keys]
    # An earlier policy's files are in the way of every second life.
    if life % 2 == 0:
        cache.free(STEP)
    child, start = os.fork(), time.monotonic()
    if child == 0:
        for index, key in enumerate(keys):
            cache.write(STEP, index, key, *values[index])
        os._exit(0)
    if life < 0:
        assert os.waitpid(child, 0)[1] == 0
        whole_s = time.monotonic() - start
        continue
    # On a busy machine no random instant need fall into a write, or behind one: every third kill waits for one to
    # begin, if it sees that, and every third for one to end.
    if life % 3 == 2:
        time.sleep(random.uniform(0, 1.2 * whole_s))
    while life % 3 == 0 and not list(Path(sys.argv[1]).rglob(".*")) and cache.finding(STEP, 2, keys[2]) is not None:
        pass
    while life % 3 == 1 and cache.finding(STEP, 0, keys[0]) is not None:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for index, key in enumerate(keys):
        reason = cache.finding(STEP, index, key)
        if reason is None:
            shard = cache.read(STEP, index, key)
            assert shard.hidden_RE.equal(values[index][0]) and shard.teacher_logprobs_R.equal(values[index][1])
            rewritten += 1
        else:
            assert reason.endswith(" is absent") or " is stale: " in reason, reason
    partial += len(list(Path(sys.argv[1]).rglob(".*")))
    missing, _ = cache.begin(STEP, keys)
    assert not list(Path(sys.argv[1]).rglob(".*"))
    assert missing == [index for index, key in enumerate(keys) if not cache.path(STEP, index, key.teacher).exists()]
    for index in missing[:2]:
        cache.write(STEP, index, keys[index], *values[index])
sys.stderr.write(f"{partial} {rewritten}\\n")
"""


def test_a_killed_writer_leaves_no_shard_that_is_not_whole(tmp_path: Path) -> None:
    """SIGKILL at random instants, thirty times; whatever has a shard's name then is a whole shard, old or new."""
    command = [sys.executable, "-c", LIVES, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stderr
    partial, rewritten = map(int, told.splitlines()[-1].split())
    assert partial > 1, "no kill came in the middle of a write"
    assert rewritten > 1, "every kill came before a write was over"
