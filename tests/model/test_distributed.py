"""Proves: a rendezvous is fresh, and those that killed groups left are removed."""

from pathlib import Path

from rollforward.model.distributed import new_rendezvous


def test_a_rendezvous_is_fresh_and_old_ones_go(tmp_path: Path) -> None:
    other = tmp_path / "metrics.jsonl"
    other.write_text("{}")
    first = new_rendezvous(tmp_path)
    assert not first.exists()
    first.write_text("left by a killed group")
    second = new_rendezvous(tmp_path)
    assert second != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
