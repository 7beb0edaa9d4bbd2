"""What a rank of torchrun's leaves of its error, read as torchrun reads it."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fakes.full_disk import longest_file
from outloop.buffer.errors import SettingsError
from outloop.engine.launch.torchrun import as_rank, cause_of_failure, leave_error


def failure_of(path: Path, exit_code: int) -> ProcessFailure:
    """Of a process that has ended."""
    return ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file=str(path))


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torchrun wants the error."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_torchrun_reads_the_sentence(error_file: Path) -> None:
    leave_error(SettingsError("trainer.num_ranks=3 does not divide"))
    failure = failure_of(error_file, 2)
    cause = cause_of_failure([(0, failure)])
    assert isinstance(cause, SettingsError)
    assert str(cause) == "trainer.num_ranks=3 does not divide"
    assert list(error_file.parent.iterdir()) == [error_file]


def test_a_rank_whose_disk_is_full_hides_no_sentence(error_file: Path) -> None:
    """It leaves no part of a file, at which torchrun would end: the other's sentence is shown."""
    with longest_file(0):
        leave_error(OSError("No space left on device"))
    assert not error_file.exists()
    mute = failure_of(error_file, 1)
    assert "it could not say why" in str(cause_of_failure([(1, mute)]))
    leave_error(RuntimeError("the checkpoint of step 4 failed"))
    assert "step 4 failed" in str(cause_of_failure([(0, failure_of(error_file, 1)), (1, mute)]))


def test_without_torchrun_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError), as_rank():
        raise RuntimeError("it broke")
    leave_error(RuntimeError("it broke"))
    assert list(tmp_path.iterdir()) == []
