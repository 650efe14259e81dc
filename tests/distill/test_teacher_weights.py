"""Proves: a teacher's values and hidden states have the bits of `Model` on the same directory, in both precisions,
however its tensors are stored and however many ranks share them; a layer's values are gone when the next is asked for;
what is damaged, cut or exchanged is told by the teacher's name.
"""

import dataclasses
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollforward.distill import teacher_weights
from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.distill.teacher_source import describe_teacher
from rollforward.distill.teacher_weights import ShardedTeacher, TeacherSource, _TeacherFiles, read_head
from rollforward.model.checkpoint import read_checkpoint, write_checkpoint
from rollforward.model.checkpoint_headers import scan_checkpoint
from rollforward.model.collectives import RankGroups
from rollforward.model.config import ModelConfig
from rollforward.model.shapes import param_specs
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Model, Transformer, load_model, packed_batch
from rollforward.model.weights import ModelWeights, published_tensors
from tests.helpers.bits import different_bits
from tests.helpers.ranks import join_alone, run_on_ranks
from tests.helpers.teachers import mapped_teachers, write_teacher
from tests.helpers.tiny import oracle_config, random_params, random_tokens, tiny_config

PRECISIONS: tuple[Precision, ...] = ("fp32", "native")


def groups(tmp_path: Path) -> RankGroups:
    join_alone(tmp_path)
    return RankGroups(1)


@pytest.fixture(scope="module", params=["published", "fp32"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TeacherSource:
    """Every kind of layer, blocks of 128 rows by the dozen, several files."""
    root = tmp_path_factory.mktemp("teachers")
    return write_teacher(root / "maths", oracle_config("flash"), seed=5, stored=request.param)


@pytest.fixture
def editable(tmp_path: Path) -> TeacherSource:
    return write_teacher(tmp_path / "teachers" / "maths", tiny_config(), seed=6)


def tensors_of(record: object) -> Iterator[Tensor]:
    """Every tensor of a record of weights, in order."""
    if isinstance(record, Tensor):
        yield record
    elif dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            yield from tensors_of(getattr(record, field.name))


def check_values(teacher: ShardedTeacher, expected: ModelWeights) -> None:
    weights = teacher.weights()
    assert different_bits(weights.embed, expected.embed) == 0
    assert len(weights.blocks) == len(expected.blocks)
    for layer, (ours, theirs) in enumerate(zip(weights.blocks, expected.blocks, strict=True)):
        pairs = list(zip(tensors_of(ours), tensors_of(theirs), strict=True))
        assert len(pairs) > 20
        assert [index for index, (a, b) in enumerate(pairs) if different_bits(a, b)] == [], layer
    for ours, theirs in ((weights.head_mix, expected.head_mix), (weights.norm, expected.norm)):
        for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert different_bits(a, b) == 0


@torch.no_grad()
def hidden(transformer: Transformer, weights: ModelWeights, tokens_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
    streams_TMD = transformer.streams(weights, tokens_T, packed_batch(transformer.config, lengths))
    return transformer.hidden(weights, streams_TMD)


def check_hidden(teacher: ShardedTeacher, model: Model) -> None:
    """Several passes of one set of weights, and the layers' order after an unfinished one."""
    lengths = (37, 1, 150)
    tokens_T = random_tokens(model.config, (sum(lengths),))
    expected = hidden(model.transformer, model.weights, tokens_T, lengths)
    transformer = Transformer(model.config, model.transformer.numerics.precision)
    weights = teacher.weights()
    for _ in range(2):
        assert different_bits(hidden(transformer, weights, tokens_T, lengths), expected) == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_and_hidden_states_are_the_models(tmp_path: Path, source: TeacherSource, precision: Precision) -> None:
    teacher = ShardedTeacher(source, groups(tmp_path), precision=precision)
    teacher.prefetch()
    model = load_model(source.directory, precision=precision)
    assert teacher.config == model.config
    check_values(teacher, model.weights)
    check_hidden(teacher, model)
    assert different_bits(read_head(source, precision=precision), model.weights.head) == 0
    teacher.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pieces_of_any_number_of_ranks_are_each_row_once(
    source: TeacherSource, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_ranks, piece_elements in ((1, 300), (2, 2**24), (3, 6000), (13, 2**24)):
        monkeypatch.setattr(teacher_weights, "_PIECE_ELEMENTS", piece_elements)
        check_pieces(source, precision, oracle_config("flash"), num_ranks=num_ranks)


def check_pieces(source: TeacherSource, precision: Precision, config: ModelConfig, *, num_ranks: int) -> None:
    values = read_checkpoint(source.directory)
    expected = published_tensors(config, values) if precision == "native" else values
    files = _TeacherFiles(source, precision)
    for spec in param_specs(config):
        value = torch.zeros(spec.shape, dtype=expected[spec.name].dtype)
        times = torch.zeros(spec.shape[0])
        for rank in range(num_ranks):
            for piece in files.share(spec, rank, num_ranks):
                times[piece.index] += 1
                packed = files.read(piece)
                assert packed.num_bytes <= piece.num_bytes
                files.unpack(piece, packed, value)
        assert bool((times == 1).all()), (spec.name, num_ranks)
        assert different_bits(value, expected[spec.name]) == 0, (spec.name, num_ranks)
    files.close()


def _layout(change: Callable[[dict[str, Tensor]], None], source: TeacherSource) -> None:
    """Rewrite a teacher as one changed file."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (source.directory / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, source.directory / "model.safetensors")


def _scales_as_numbers(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        if name.endswith(".scale") and ".experts." not in name:
            tensors[name] = tensors[name].to(torch.float32)


def _fused_experts(tensors: dict[str, Tensor]) -> None:
    layers = sorted({name.rsplit(".experts.", 1)[0] for name in tensors if ".ffn.experts." in name})
    for layer in layers:
        if layer.startswith("mtp"):
            continue
        count = sum(name.startswith(f"{layer}.experts.") and name.endswith(".w1.weight") for name in tensors)
        w1, w2, w3 = (
            torch.stack([tensors.pop(f"{layer}.experts.{expert}.{matrix}.weight") for expert in range(count)])
            for matrix in ("w1", "w2", "w3")
        )
        module = "model." + layer.replace(".ffn", ".mlp")
        tensors[f"{module}.experts.gate_up_proj"] = torch.cat((w1, w3), dim=1)
        tensors[f"{module}.experts.down_proj"] = w2


@pytest.mark.parametrize("layout", ["scales as numbers", "fused experts", "fp8 experts"])
def test_other_layouts(tmp_path: Path, layout: str) -> None:
    config = tiny_config()
    if layout == "fp8 experts":
        config = msgspec.structs.replace(config, expert_dtype="fp8")
    source = write_teacher(
        tmp_path / "teachers" / "maths", config, 4, stored="fp32" if layout == "fused experts" else "published"
    )
    if layout != "fp8 experts":
        _layout(_scales_as_numbers if layout == "scales as numbers" else _fused_experts, source)
    teacher = ShardedTeacher(source, groups(tmp_path), precision="native")
    check_values(teacher, load_model(source.directory, precision="native").weights)
    teacher.close()
    check_pieces(source, "native", config, num_ranks=3)


class CountingGroups(RankGroups):
    gathers = 0

    def all_gather(self, shard: Tensor, *, over: object) -> Tensor:
        self.gathers += 1
        return super().all_gather(shard, over=over)  # type: ignore[arg-type]


def check_on_ranks(_rank: int, root: str, precision: Precision) -> None:
    """Values, one gather a layer, and passes in which a rank has nothing to compute."""
    directory = Path(root) / "teachers" / "maths"
    source = TeacherSource(name="maths", directory=directory, version="", width=0)
    counting = CountingGroups(1)
    teacher = ShardedTeacher(source, counting, precision=precision)
    teacher.prefetch()
    assert counting.gathers == 0, "construction and prefetch are not collective"
    model = load_model(directory, precision=precision)
    check_values(teacher, model.weights)
    assert counting.gathers == 1 + model.config.num_hidden_layers
    if counting.rank % 2 == 0:
        check_hidden(teacher, model)
    else:
        teacher.skip_pass()
        teacher.skip_pass()
    assert counting.gathers == 3 * (1 + model.config.num_hidden_layers)
    teacher.close()


def test_ranks_share_rows_and_get_the_same_bits(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teachers" / "maths", oracle_config("flash"), seed=7)
    run_on_ranks(check_on_ranks, 2, tmp_path, str(tmp_path), "native")


def test_each_rank_reads_its_share_only(source: TeacherSource) -> None:
    files = _TeacherFiles(source, "native")
    trunk = [spec for spec in param_specs(oracle_config("flash")) if spec.name.startswith(("embed.", "layers."))]
    shares = [sum(p.num_bytes for spec in trunk for p in files.share(spec, rank, 4)) for rank in range(4)]
    assert max(shares) < 0.4 * sum(shares), shares  # matrices of one FP8 block have one owner
    files.close()


def live_bytes() -> int:
    """Bytes of all tensors that exist, shared memory once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, Tensor)
    }
    return sum(storages.values())


def test_a_layers_values_are_gone_when_the_next_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = oracle_config("flash")
    source = write_teacher(tmp_path / "teachers" / "maths", config, seed=8)
    teacher = ShardedTeacher(source, groups(tmp_path), precision="native")
    largest = max(
        sum(4 * spec.num_elements for spec in param_specs(config) if spec.name.startswith(f"layers.{layer}."))
        for layer in range(config.num_hidden_layers)
    )
    all_layers = sum(4 * spec.num_elements for spec in param_specs(config) if spec.name.startswith("layers."))
    assert all_layers > 4 * largest
    before = live_bytes()
    held: list[int] = []
    fill = ShardedTeacher.fill

    def measured(self: ShardedTeacher, index: int, workspace: Tensor) -> dict[str, Tensor]:
        held.append(live_bytes() - before)  # what the forward still holds when it asks for more
        values = fill(self, index, workspace)
        held.append(live_bytes() - before)
        return values

    monkeypatch.setattr(ShardedTeacher, "fill", measured)
    weights = teacher.weights()
    hidden(Transformer(config, "native"), weights, random_tokens(config, (6,)), (6,))
    assert len(held) == 2 * (1 + config.num_hidden_layers)
    assert max(held) < 1.5 * largest, (held, largest)  # rotary tables and activations come beside it
    first = weights.blocks[0]
    storage = first.attn.wq_a.untyped_storage()
    assert {one.untyped_storage().data_ptr() for one in tensors_of(first)} == {storage.data_ptr()}
    assert {one.data_ptr() % 64 for one in tensors_of(first)} == {0}
    copy = first.attn.wq_a.clone()
    second = weights.blocks[1]
    assert second.attn.wq_a.untyped_storage().data_ptr() == storage.data_ptr()
    assert different_bits(copy, first.attn.wq_a) > 0
    del weights, first, second, storage
    assert live_bytes() - before < 0.1 * largest, "memory goes with the pass, not with the teacher"
    teacher.close()


def test_one_layer_is_asked_for_at_a_time(tmp_path: Path, editable: TeacherSource) -> None:
    teacher = ShardedTeacher(editable, groups(tmp_path), precision="native")
    blocks = teacher.weights().blocks
    for index in (4, -1, slice(0, 2)):
        with pytest.raises(IndexError, match="one is asked for at a time"):
            blocks[index]
    teacher.close()


def test_files_are_mapped_until_close_and_a_heads_no_longer_than_it_is_read(tmp_path: Path) -> None:
    root = tmp_path / "teachers"
    source = write_teacher(root / "maths", tiny_config(), seed=6)
    assert mapped_teachers(root) == set()
    teacher = ShardedTeacher(source, groups(tmp_path), precision="native")
    assert mapped_teachers(root) == {"maths"}
    shutil.rmtree(source.directory)  # whoever removes it now changes nothing
    teacher.prefetch()
    assert len(list(teacher.weights().blocks)) == 4
    teacher.close()
    assert mapped_teachers(root) == set()
    other = write_teacher(root / "other", tiny_config(), seed=6)
    read_head(other, precision="native")
    assert mapped_teachers(root) == set()


def one_file(source: TeacherSource, tensor: str) -> tuple[Path, int]:
    """The file that has a tensor, and where its data begins."""
    entry = scan_checkpoint(source.directory)[tensor]
    return entry.file, entry.offset


def test_what_is_absent_or_damaged_at_the_start_is_told_by_name(tmp_path: Path, editable: TeacherSource) -> None:
    described = describe_teacher("maths", editable.directory)
    file, _ = one_file(editable, "layers.2.attn.wq_b.weight")
    whole = file.read_bytes()
    alone = groups(tmp_path)
    os.truncate(file, len(whole) - 1)
    for read in (
        lambda: ShardedTeacher(described, alone, precision="native"),
        lambda: read_head(described, precision="native"),
    ):
        with pytest.raises(TeacherReadError, match=rf"teacher maths: .*{file.name}.* put it back and resume"):
            read()
    file.unlink()
    with pytest.raises(TeacherReadError, match=rf"teacher maths: .*{file.name}"):
        ShardedTeacher(described, alone, precision="native")
    file.write_bytes(whole)
    os.utime(file, ns=(1, described.stamps[file.name].written_ns))
    ShardedTeacher(described, alone, precision="native").close()
    (editable.directory / "config.json").unlink()
    with pytest.raises(TeacherReadError, match=r"teacher maths: .*config\.json"):
        ShardedTeacher(described, alone, precision="native")
    shutil.rmtree(editable.directory)
    with pytest.raises(TeacherReadError, match="teacher maths"):
        ShardedTeacher(described, alone, precision="native")
    assert mapped_teachers(tmp_path / "teachers") == set()


def test_another_model_of_the_same_names_and_times_is_told_by_size(tmp_path: Path) -> None:
    directory, config = tmp_path / "teachers" / "maths", tiny_config()
    directory.parent.mkdir()
    write_checkpoint(directory, config, random_params(config, 6))
    described = describe_teacher("maths", directory)
    shutil.rmtree(directory)
    write_checkpoint(directory, config, random_params(config, 6), precision="fp32")
    for name, stamp in described.stamps.items():
        os.utime(directory / name, ns=(1, stamp.written_ns))
    with pytest.raises(TeacherReadError, match=r"teacher maths: model-\S* was written to, or replaced, during the run"):
        ShardedTeacher(described, groups(tmp_path), precision="native")


def test_a_file_that_is_written_to_during_the_run_is_told(tmp_path: Path, editable: TeacherSource) -> None:
    described = describe_teacher("maths", editable.directory)
    file, offset = one_file(editable, "head.weight")
    for one in editable.directory.iterdir():
        one.chmod(0o600)
        one.with_name(one.name + ".kept").hardlink_to(one)  # neither changes what is in it
    ShardedTeacher(described, groups(tmp_path), precision="native").close()
    with file.open("r+b") as out:
        out.seek(offset)
        out.write(b"\x01")
    for changed in (file, editable.directory / "config.json"):
        before = described.stamps[changed.name].written_ns
        os.utime(changed, ns=(1, before + 1))
        with pytest.raises(TeacherReadError, match=rf"teacher maths: {changed.name} was written to, or replaced"):
            ShardedTeacher(described, groups(tmp_path), precision="native")
        with pytest.raises(TeacherReadError, match=rf"teacher maths: {changed.name} was written to, or replaced"):
            read_head(described, precision="native")
        os.utime(changed, ns=(1, before))
        # Size and time are as they were; the bytes are not.
        with pytest.raises(TeacherReadError, match=r"teacher maths: .* was written to, or replaced"):
            read_head(described, precision="native")
    shutil.rmtree(editable.directory)
    with pytest.raises(TeacherReadError, match="teacher maths"):
        read_head(described, precision="native")


def test_a_file_that_is_cut_while_it_is_mapped_is_told_and_ends_nothing(
    tmp_path: Path, editable: TeacherSource
) -> None:
    teacher = ShardedTeacher(editable, groups(tmp_path), precision="native")
    file, offset = one_file(editable, "layers.2.attn.wq_b.weight")
    os.truncate(file, offset)
    told = rf"teacher maths: layers\.\d.* ends at byte \d+ of .*{file.name}, which has only \d+ by now"
    with pytest.raises(TeacherReadError, match=told):
        teacher.prefetch()
    weights = teacher.weights()
    assert len(weights.embed)
    with pytest.raises(TeacherReadError, match=told):
        list(weights.blocks)
    teacher.close()


@pytest.mark.parametrize(
    ("tensor", "content"),
    [
        ("layers.1.attn.wq_a.weight", b"\x7f"),  # NaN of E4M3
        ("layers.1.attn_norm.weight", b"\x80\x7f"),  # infinity of BF16
        ("layers.3.ffn.experts.5.w2.scale", b"\xff"),
        ("layers.0.ffn.gate.tid2eid", b"\xff" * 8),
        ("embed.weight", b"\xc0\x7f"),
        ("norm.weight", b"\xc0\x7f"),
        ("head.weight", b"\xc0\x7f"),
    ],
)
def test_values_that_are_none_are_found_while_loading(
    tmp_path: Path, editable: TeacherSource, tensor: str, content: bytes
) -> None:
    file, offset = one_file(editable, tensor)
    with file.open("r+b") as out:
        out.seek(offset)
        out.write(content)

    def load() -> None:
        if tensor == "head.weight":
            read_head(editable, precision="native")
        ShardedTeacher(editable, groups(tmp_path), precision="native").prefetch()

    with pytest.raises(TeacherReadError, match=rf"teacher maths: \S+: {tensor} holds"):
        load()
    with pytest.raises(TeacherError, match=rf"teacher maths: \S+: {tensor} holds"):
        describe_teacher("maths", editable.directory)
    assert mapped_teachers(tmp_path / "teachers") <= {"maths"}
