"""Processes, progress, report and doctor."""

import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from fakes.full_disk import longest_file
from outloop.buffer.errors import SETTINGS_EXIT_CODE, SettingsError
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import METRICS, MetricsWriter, read_metrics
from outloop.engine.launch.child_process import PartProcess, part_command
from outloop.engine.launch.console import RunProgress
from outloop.engine.launch.doctor import examine
from outloop.engine.launch.last_sentence import VARIABLE
from outloop.engine.launch.run_summary import draw_curve, read_curve, result_table
from outloop.engine.launch.settings_checks import check_before_start


def python(name: str, code: str, folder: Path) -> PartProcess:
    """A part that runs `code`."""
    return PartProcess(name, [sys.executable, "-c", code], folder / f"{name}.log", {"X": "1"})


def test_a_part_is_stopped_by_a_signal(tmp_path: Path) -> None:
    """SIGTERM is enough for a part that obeys it."""
    part = python("obedient", "import signal; signal.pause()", tmp_path)
    part.stop(timeout_s=20)
    assert part.exit_code == -signal.SIGTERM


@pytest.mark.medium
def test_a_part_that_ignores_signals_is_killed_with_its_children(tmp_path: Path) -> None:
    """Past the deadline the whole process group is killed."""
    code = textwrap.dedent("""
        import signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(child.pid, flush=True)
        signal.pause()
    """)
    part = python("stubborn", code, tmp_path)
    while not part.last_words().strip():
        assert part.exit_code is None
    child = psutil.Process(int(part.last_words().strip()))
    part.stop(timeout_s=0.2)
    assert part.exit_code == -signal.SIGKILL
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.medium
def test_a_part_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9 of the launcher leaves no part behind."""
    code = textwrap.dedent(f"""
        import sys, signal
        from pathlib import Path
        from outloop.engine.launch.child_process import PartProcess
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        part = PartProcess("orphan", command, Path({str(tmp_path)!r}) / "orphan.log", {{}})
        print(part.pid, flush=True)
        signal.pause()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        part = psutil.Process(int(launcher.stdout.readline()))
        os.kill(launcher.pid, signal.SIGKILL)
    psutil.wait_procs([part], timeout=10)
    assert not part.is_running() or part.status() == psutil.STATUS_ZOMBIE


def test_last_words_are_the_end_of_the_log(tmp_path: Path) -> None:
    """What a part said before it ended is at hand for the error."""
    part = python("talker", "print('one'); print('two'); raise SystemExit(3)", tmp_path)
    while part.exit_code is None:
        pass
    assert part.exit_code == 3
    assert part.last_words(1) == "two"


@pytest.mark.medium
def test_a_part_on_another_machine_says_its_last_sentence_in_the_log_alone(tmp_path: Path) -> None:
    """An engine carries the variable there, where the number is no file, or another one."""
    reading, writing = os.pipe()
    for name, number in (("nothing", 1000), ("another pipe", writing)):
        answer = subprocess.run(
            [sys.executable, "-m", "outloop.cli", "trainer", "--run", str(tmp_path)],
            env={**os.environ, VARIABLE: f"{number}:1"},
            pass_fds=(writing,),
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == SETTINGS_EXIT_CODE, name
        assert "outloop: " in answer.stderr
        assert "Traceback" not in answer.stderr
    os.close(writing)
    assert os.read(reading, 100) == b""
    os.close(reading)


def test_the_last_sentence_is_heard_from_a_full_disk(tmp_path: Path) -> None:
    """Of a part that cannot write its log, with the exit code that it always has; and once of one
    that can."""
    command = part_command("trainer", tmp_path / "missing")
    ends = []
    with longest_file(0) as lift:
        for name in ("mute", "heard"):
            part = PartProcess(name, command, tmp_path / f"{name}.log", {})
            while part.exit_code is None:
                pass
            ends.append((part.exit_code, part.last_words()))
            lift()
    assert (tmp_path / "mute.log").read_text() == ""
    assert ends[0] == ends[1]
    assert ends[0][0] == SETTINGS_EXIT_CODE
    assert ends[0][1].startswith("outloop: ")


def test_an_undeclared_metric_is_refused(tmp_path: Path) -> None:
    """Every metric name is declared with its meaning."""
    with MetricsWriter(tmp_path) as writer, pytest.raises(KeyError, match="train/nothing"):
        writer.write(1, {"train/nothing": 1.0})
    assert all(METRICS.values())


def test_metrics_survive_a_torn_line(tmp_path: Path) -> None:
    """A row that was being written at a crash is left out; NaN is null."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train')
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [None]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps with two evaluations."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"eval/sampled_reward": 0.2, "eval/sampled_se": 0.01})
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 0.1, "train/reward_mean": 0.2 * step})
        writer.write(3, {"eval/sampled_reward": 0.6, "eval/greedy_reward": 0.9})
    return tmp_path


def test_the_curve_is_what_was_recorded(run_dir: Path) -> None:
    """Training rewards and evaluations come back in order, each at its step."""
    curve = read_curve(run_dir)
    assert curve.steps == (1, 2, 3)
    assert [point.step for point in curve.sampled] == [0, 3]
    assert curve.greedy[0].reward == 0.9


@pytest.mark.medium
def test_the_picture_is_a_png(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run with points gets a picture; a run without gets none."""
    path = draw_curve(run_dir)
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert draw_curve(tmp_path_factory.mktemp("empty")) is None


def test_the_table_shows_first_and_last(run_dir: Path) -> None:
    """The table at the end has the first and the last evaluation."""
    out = io.StringIO()
    Console(file=out, width=100).print(result_table(run_dir))
    assert "0.200" in out.getvalue()
    assert "0.600" in out.getvalue()


def test_progress_prints_a_line_a_step(tmp_path: Path) -> None:
    """Off a terminal each new step is one line, and a wait is named before the first."""
    out = io.StringIO()
    with RunProgress(tmp_path, num_steps=2, console=Console(file=out, width=200)) as progress:
        assert not progress.update({"trainer": {"waiting_for": "server-0 to load"}})
        with MetricsWriter(tmp_path) as writer:
            writer.write(1, {"train/loss": 0.5, "train/reward_mean": 0.25})
        assert progress.update({})
    text = out.getvalue()
    assert "waiting for trainer: server-0 to load" in text
    assert "step 1: reward 0.250" in text


def test_failed_episodes_are_in_the_line_and_the_table(tmp_path: Path) -> None:
    """A step in which none failed says nothing of it."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    with (
        RunProgress(tmp_path, num_steps=2, console=console) as progress,
        MetricsWriter(tmp_path) as writer,
    ):
        for step, share in ((1, 0.0), (2, 0.5)):
            row = {"train/loss": 0.5, "train/reward_mean": 0.25, "train/failed_share": share}
            writer.write(step, row)
            progress.update({})
    assert "failed" not in out.getvalue().splitlines()[0]
    assert "failed 0.50" in out.getvalue().splitlines()[1]
    console.print(result_table(tmp_path))
    assert "share of failed episodes" in out.getvalue()


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "evaluation at step 5: sampled 0.500"),
        (
            0.9,
            "evaluation at step 5 (sampled by versions 5 to 17, not by that step's alone): sampled",
        ),
    ],
)
def test_the_line_of_an_evaluation_names_its_versions(
    tmp_path: Path, share: float, text: str
) -> None:
    """Where they are several: its number is not that of the step's weights."""
    out = io.StringIO()
    versions = {"eval/oldest_version": 5.0, "eval/newest_version": 17.0, "eval/mixed_share": share}
    with (
        RunProgress(tmp_path, num_steps=9, console=Console(file=out, width=200)) as progress,
        MetricsWriter(tmp_path) as writer,
    ):
        writer.write(5, {"eval/sampled_reward": 0.5, "eval/sampled_se": 0.1} | versions)
        progress.update({})
    assert text in out.getvalue()
    point = read_curve(tmp_path).sampled[0]
    assert point.versions == ("5 to 17" if share else "")
    Console(file=out, width=200).print(result_table(tmp_path))
    assert ("0.500 +- 0.100 (of versions 5 to 17)" in out.getvalue()) == bool(share)
    assert draw_curve(tmp_path) is not None


def test_a_warning_is_shown_once(tmp_path: Path) -> None:
    """What a part warns of reaches the person at the terminal, and is not repeated."""
    out = io.StringIO()
    with RunProgress(tmp_path, num_steps=2, console=Console(file=out, width=200)) as progress:
        for _ in range(3):
            progress.update({"trainer": {"waiting_for": "", "warning": "all rewards were equal"}})
    assert out.getvalue().count("all rewards were equal") == 1


def test_doctor_finds_this_machine_fit() -> None:
    """Where the tests run, everything required is there."""
    out = io.StringIO()
    assert examine(Console(file=out, width=160)) == 0
    assert "make demo" in out.getvalue()
    assert "agent sandbox" in out.getvalue()


@pytest.mark.medium
def test_doctor_warns_where_agent_programs_are_not_confined(tmp_path: Path) -> None:
    """Without bubblewrap an agent program starts only with the run's keys in reach: it is said."""
    answer = subprocess.run(
        [sys.executable, "-m", "outloop.cli", "doctor"],
        env={**os.environ, "PATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    (line,) = [line for line in answer.stdout.splitlines() if "agent sandbox" in line]
    assert "no bwrap on PATH" in line
    assert "optional" in line
    assert "can read the run's keys" in answer.stdout


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_model_folder_that_lacks_a_file_is_refused(
    name: str, weights: str, tmp_path: Path
) -> None:
    """Each file is missed by its name, though the others are there."""
    for other in ("config.json", "tokenizer.json", weights):
        (tmp_path / other).write_text("{}")
    (tmp_path / (weights if name == "model.safetensors" else name)).unlink()
    with pytest.raises(SettingsError, match=f"holds no {name}"):
        check_before_start(Settings(model={"path": tmp_path}))
