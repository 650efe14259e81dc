"""Proves: of twelve teachers never more than one is in memory and one loading; what a load meets is raised where it is
waited for, by name; what a teacher says of tokens has the bits of `Model`, whatever ranks, packing and neighbours.
"""

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollforward.distill import teachers
from rollforward.distill.errors import TeacherReadError
from rollforward.distill.teacher_source import describe_teacher
from rollforward.distill.teacher_weights import ShardedTeacher, TeacherSource
from rollforward.distill.teachers import HeadShelf, TeacherScorer, TeacherShelf
from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.checkpoint_headers import scan_checkpoint
from rollforward.model.collectives import RankGroups
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Model, load_model, packed_batch
from tests.helpers.bits import different_bits
from tests.helpers.ranks import join_alone, run_on_ranks
from tests.helpers.teachers import mapped_teachers, wide_config, write_teacher
from tests.helpers.tiny import random_tokens, tiny_config

NAMES = tuple(f"t{index:02}" for index in range(12))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TeacherSource]:
    """Twelve teachers, no two alike."""
    root = tmp_path_factory.mktemp("teachers")
    return {name: write_teacher(root / name, wide_config(), seed) for seed, name in enumerate(NAMES)}


def trunks(sources: dict[str, TeacherSource], tmp_path: Path, precision: Precision = "native") -> TeacherShelf:
    join_alone(tmp_path)
    return TeacherShelf(sources, RankGroups(1), precision=precision)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, sources: dict[str, TeacherSource]) -> dict[str, Any]:
    """What exists whenever something is made, mapped or read: trunks, heads, and directories of which files are
    mapped."""
    root = sources[NAMES[0]].directory.parent
    made: dict[str, Any] = {"trunks": weakref.WeakSet(), "heads": weakref.WeakSet(), "most": {}, "mapped": 0}
    lock = threading.Lock()

    def look() -> None:
        with lock:
            for kind in ("trunks", "heads"):
                made["most"][kind] = max(made["most"].get(kind, 0), len(made[kind]))
            made["mapped"] = max(made["mapped"], len(mapped_teachers(root)))

    class Counted(ShardedTeacher):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made["trunks"].add(self)
            look()

        def prefetch(self, until: threading.Event | None = None) -> None:
            super().prefetch(until)
            look()

    read_head = teachers.read_head

    def counted(*arguments: Any, **options: Any) -> Tensor:
        head = read_head(*arguments, **options)
        made["heads"].add(head)
        look()
        return head

    monkeypatch.setattr(teachers, "ShardedTeacher", Counted)
    monkeypatch.setattr(teachers, "read_head", counted)
    return made


def loaders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("load ")]


def test_of_twelve_trunks_one_is_in_use_and_one_loading(
    tmp_path: Path, sources: dict[str, TeacherSource], live: dict[str, Any]
) -> None:
    shelf = trunks(sources, tmp_path)
    root = sources[NAMES[0]].directory.parent
    gone: list[weakref.ref[ShardedTeacher]] = []
    for name, then in zip(NAMES, [*NAMES[1:], None], strict=True):
        teacher = shelf.use(name, then)
        assert [reference() for reference in gone] == [None] * len(gone), "the one before was let go"
        assert mapped_teachers(root) - {name, then} == set()
        assert len(teacher.weights().blocks) == 3
        assert different_bits(teacher.weights().embed, load_model(root / name, precision="native").weights.embed) == 0
        assert shelf.use(name, then) is teacher
        gone.append(weakref.ref(teacher))
        del teacher
    assert (shelf.loads, shelf.held_max) == (12, 2)
    assert live["most"]["trunks"] == 2
    assert live["mapped"] == 2
    shelf.close()
    gc.collect()
    assert len(live["trunks"]) == 0
    assert mapped_teachers(root) == set()
    assert loaders() == []


def test_of_twelve_heads_one_is_in_use_and_one_loading(sources: dict[str, TeacherSource], live: dict[str, Any]) -> None:
    shelf = HeadShelf(sources, precision="native")
    for name, then in zip(NAMES, [*NAMES[1:], None], strict=True):
        head_VE = shelf.use(name, then)
        assert head_VE.dtype == torch.float32
        assert tuple(head_VE.shape) == (512, 160)
        assert different_bits(head_VE, load_model(sources[name].directory, precision="native").weights.head) == 0
        reference = weakref.ref(head_VE)
        del head_VE
        assert reference() is not None
        if then is not None:
            shelf.use(then, None)
            assert reference() is None
            assert shelf.use(then, None) is not None
    assert (shelf.loads, shelf.held_max) == (12, 2)
    assert live["most"]["heads"] == 2
    assert live["mapped"] <= 2
    shelf.clear()
    assert len(live["heads"]) == 0


def test_what_is_loaded_for_nothing_makes_room(
    tmp_path: Path, sources: dict[str, TeacherSource], live: dict[str, Any]
) -> None:
    shelf = trunks(sources, tmp_path)
    root = sources[NAMES[0]].directory.parent
    assert shelf.use("t00", "t00") is shelf.use("t00", None)
    assert (shelf.loads, shelf.held_max) == (1, 1)
    shelf.use("t00", "t01")
    shelf.use("t00", "t02")  # another is wanted after all
    assert (shelf.loads, shelf.held_max) == (3, 2)
    shelf.use("t00", None)  # nobody says; what is under way stays
    shelf.use("t02", None)
    assert (shelf.loads, shelf.held_max) == (3, 2)
    shelf.use("t02", "t03")
    shelf.use("t04", "t05")
    assert shelf.loads == 6
    assert mapped_teachers(root) <= {"t04", "t05"}
    shelf.clear()
    assert mapped_teachers(root) == set()
    assert len(shelf.use("t05", None).weights().blocks) == 3, "it may be used again"
    shelf.close()
    assert live["most"]["trunks"] <= 2
    assert live["mapped"] <= 2


def test_what_somebody_keeps_is_counted(tmp_path: Path, sources: dict[str, TeacherSource]) -> None:
    shelf, heads = trunks(sources, tmp_path), HeadShelf(sources, precision="native")
    kept: list[object] = []
    for name, then in itertools.pairwise(NAMES[:6]):
        kept.append(shelf.use(name, then))
        kept.append(heads.use(name, then)[3:5])  # a view has all of the memory
        assert (shelf.held_max, heads.held_max) == (len(kept) // 2 + 1,) * 2
    del kept[:]
    for name in NAMES[6:9]:
        shelf.use(name, None)
        heads.use(name, None)
    assert (shelf.held_max, heads.held_max) == (6, 6), "the most that there ever were"
    for one in (shelf, heads):
        assert sum(reference() is not None for reference in one._loaded) == 1
        one.close()
        assert [reference() for reference in one._loaded] == [None]


def damage(source: TeacherSource, *, cut: bool) -> None:
    """NaN in trunk and head, or a file cut."""
    entries = scan_checkpoint(source.directory)
    for name in ("head.weight", "layers.2.attn_norm.weight"):
        with entries[name].file.open("r+b") as out:
            out.seek(entries[name].offset)
            out.write(b"\xc0\x7f")
    if cut:
        file = entries["norm.weight"].file
        os.truncate(file, file.stat().st_size - 8)


@pytest.mark.parametrize("cut", [True, False])
def test_what_a_load_meets_is_raised_at_its_use(tmp_path: Path, *, cut: bool) -> None:
    made = {name: write_teacher(tmp_path / "teachers" / name, tiny_config(), 1) for name in "abc"}
    described = {name: describe_teacher(name, source.directory) for name, source in made.items()}
    damage(described["b"], cut=cut)
    for shelf in (trunks(described, tmp_path), HeadShelf(described, precision="native")):
        first = shelf.use("a", "b")
        assert first is not None
        assert shelf.use("a", "b") is first, "nobody asked for b yet"
        for _ in range(2):
            with pytest.raises(TeacherReadError, match=r"^teacher b: .* put it back and resume"):
                shelf.use("b", "c")
        assert shelf.use("c", "a") is not None
        assert shelf.use("a", "b") is not None
        shelf.close()  # although b failed meanwhile
        assert loaders() == []
    assert mapped_teachers(tmp_path / "teachers") == set()


def test_a_directory_that_vanished(tmp_path: Path) -> None:
    source = write_teacher(tmp_path / "teachers" / "a", tiny_config(), 1)
    shelf, heads = trunks({"a": source}, tmp_path), HeadShelf({"a": source}, precision="native")
    source.directory.rename(tmp_path / "elsewhere")
    for one in (shelf, heads):
        with pytest.raises(TeacherReadError, match=r"^teacher a: "):
            one.use("a", None)
    (tmp_path / "elsewhere").rename(source.directory)
    for one in (shelf, heads):
        assert one.use("a", None) is not None
        one.close()


def test_a_file_that_is_exchanged_between_two_loads(tmp_path: Path) -> None:
    made = {name: write_teacher(tmp_path / "teachers" / name, tiny_config(), 1) for name in "ab"}
    for kind in ("trunks", "heads"):
        described = {name: describe_teacher(name, source.directory) for name, source in made.items()}
        shelf = trunks(described, tmp_path) if kind == "trunks" else HeadShelf(described, precision="native")
        shelf.use("b", "a")
        shelf.use("a", None)
        for file in made["b"].directory.glob("*.safetensors"):
            other = file.with_suffix(".other")
            other.write_bytes(file.read_bytes())
            other.rename(file)
        with pytest.raises(TeacherReadError, match=r"^teacher b: .* was written to, or replaced, during the run"):
            shelf.use("b", None)
        shelf.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Trunks whose load goes on until it is given up, or this is set."""
    go = threading.Event()

    class Slow(ShardedTeacher):
        def prefetch(self, until: threading.Event | None = None) -> None:
            assert until is not None
            while not go.wait(0.005) and not until.is_set():
                pass
            super().prefetch(until)

    monkeypatch.setattr(teachers, "ShardedTeacher", Slow)
    yield go
    go.set()


def test_closing_gives_up_a_load_and_waits_for_its_thread(
    tmp_path: Path, sources: dict[str, TeacherSource], slow: threading.Event
) -> None:
    shelf = trunks(sources, tmp_path)
    slow.set()
    shelf.use("t00", None)
    slow.clear()
    shelf.use("t00", "t01")
    assert loaders() == ["load t01"]
    shelf.close()
    assert loaders() == []
    assert mapped_teachers(sources["t00"].directory.parent) == set()


def test_use_waits_for_the_load_that_is_under_way(
    tmp_path: Path, sources: dict[str, TeacherSource], slow: threading.Event
) -> None:
    shelf = trunks(sources, tmp_path)
    slow.set()
    shelf.use("t00", None)
    slow.clear()
    shelf.use("t00", "t01")
    threading.Timer(0.1, slow.set).start()
    shelf.use("t01", None)
    assert slow.is_set()
    assert shelf.loads == 2
    shelf.close()


def sequences() -> list[Tensor]:
    """Longer than windows and compressed entries of the teachers, and short ones."""
    return [random_tokens(wide_config(), (length,), seed=length) for length in (90, 3, 41, 2, 17)]


def scoring_batch(parts: list[Tensor], *, first: int = 0) -> ScoringBatch:
    """Sequences end to end, of which rows from ``first`` on are scored, but for each last one."""
    tokens_T = torch.cat(parts)
    mask = [first <= row < len(part) - 1 for part in parts for row in range(len(part))]
    return ScoringBatch(
        token_ids_T=tokens_T,
        sequence_lengths=tuple(map(len, parts)),
        target_ids_T=tokens_T.roll(-1),
        scored_mask_T=torch.tensor(mask),
    )


@torch.no_grad()
def expected(model: Model, part: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden vectors and log-probs of one sequence alone."""
    streams_TMD = model.transformer.streams(model.weights, part, packed_batch(model.config, [len(part)]))
    hidden_TD = model.transformer.hidden(model.weights, streams_TMD)[:-1]
    logprobs_T, _ = token_logprob(model.transformer.logits(model.weights, hidden_TD), part[1:], temperature=1.0)
    return hidden_TD, logprobs_T


def scorer_of(sources: dict[str, TeacherSource], groups: RankGroups, precision: Precision) -> TeacherScorer:
    shelf = TeacherShelf(sources, groups, precision=precision)
    return TeacherScorer(shelf, HeadShelf(sources, precision=precision), precision=precision)


@pytest.mark.parametrize("precision", ["native", "fp32"])
def test_scores_are_the_models_however_packed(
    tmp_path: Path, sources: dict[str, TeacherSource], precision: Precision
) -> None:
    join_alone(tmp_path)
    scorer = scorer_of(sources, RankGroups(1), precision)
    model = load_model(sources["t03"].directory, precision=precision)
    truth = [expected(model, part) for part in sequences()]
    for packing in ([[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4]], [[4, 2], [3, 0], [1]]):
        batches = [scoring_batch([sequences()[index] for index in indices]) for indices in packing]
        scores = list(scorer.score("t03", "t04", batches))
        for indices, scored in zip(packing, scores, strict=True):
            assert scored is not None
            hidden_RE, logprobs_R = scored
            assert hidden_RE.shape == (len(logprobs_R), 160)
            assert different_bits(hidden_RE, torch.cat([truth[index][0] for index in indices])) == 0
            assert different_bits(logprobs_R, torch.cat([truth[index][1] for index in indices])) == 0
            assert not hidden_RE.requires_grad
            is_rounded = different_bits(hidden_RE, hidden_RE.to(torch.bfloat16).float()) == 0
            assert is_rounded == (precision == "native")
            assert float(logprobs_R.max()) < 0
    (scored,) = scorer.score("t03", None, [scoring_batch([sequences()[0]], first=60)])
    assert scored is not None
    assert different_bits(scored[0], truth[0][0][60:]) == 0
    (other,) = scorer.score("t04", None, [scoring_batch([sequences()[0]], first=60)])
    assert other is not None
    assert different_bits(scored[0], other[0]) > 1000


def test_the_students_routes_and_kept_sets_are_not_the_teachers(
    tmp_path: Path, sources: dict[str, TeacherSource]
) -> None:
    join_alone(tmp_path)
    scorer = scorer_of(sources, RankGroups(1), "native")
    batch = scoring_batch(sequences())
    length = len(batch.token_ids_T)
    student = replace(
        batch,
        routes_TLK=torch.zeros(length, 4, 2, dtype=torch.int16),
        kept_counts_T=torch.ones(length, dtype=torch.int64),
        kept_ids=batch.target_ids_T,
    )
    plain, routed = scorer.score("t01", None, [batch, student])
    assert plain is not None
    assert routed is not None
    assert different_bits(plain[0], routed[0]) == 0
    assert different_bits(plain[1], routed[1]) == 0


def score_on_ranks(rank: int, num_ranks: int, directory: str) -> None:
    """Ranks have their share of five micro-batches of one teacher, then of three of another."""
    names = ("a", "b")
    sources = {
        name: TeacherSource(name=name, directory=Path(directory) / name, version="", width=160) for name in names
    }
    scorer = scorer_of(sources, RankGroups(1), "native")
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, then, parts in (("a", "b", sequences()), ("b", None, sequences()[:3])):
        mine = list(range(rank, len(parts), num_ranks))
        passes = -(-len(parts) // num_ranks)
        batches = [scoring_batch([parts[index]]) for index in mine] + [None] * (passes - len(mine))
        scores = list(scorer.score(name, then, batches))
        assert [scored is None for scored in scores] == [batch is None for batch in batches]
        found |= {f"{name} {index}": scored for index, scored in zip(mine, scores, strict=False) if scored is not None}
    torch.save(found, Path(directory) / f"{num_ranks}-{rank}.pt")


def test_two_ranks_score_what_one_does(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_teacher(tmp_path / name, wide_config(), seed)
    for num_ranks in (1, 2):
        run_on_ranks(score_on_ranks, num_ranks, tmp_path, num_ranks, str(tmp_path))
    alone = torch.load(tmp_path / "1-0.pt")
    shares = [torch.load(tmp_path / f"2-{rank}.pt") for rank in range(2)]
    assert len(alone) == 8
    assert [len(share) for share in shares] == [5, 3]
    for name, ours in (shares[0] | shares[1]).items():
        assert different_bits(ours[0], alone[name][0]) == 0, name
        assert different_bits(ours[1], alone[name][1]) == 0, name
    model = load_model(tmp_path / "a", precision="native")
    assert different_bits(alone["a 2"][0], expected(model, sequences()[2])[0]) == 0
