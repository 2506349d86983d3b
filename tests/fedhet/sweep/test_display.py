"""What a terminal and a log show of a sweep."""

import io
from pathlib import Path

from rich.console import Console

from fedhet.progress import score
from fedhet.sweep.display import closing_summary, display_for
from fedhet.sweep.progress import Job, Snapshot, SweepFollower
from fedhet.sweep.sweep_folder import JobReport, Sweep, SweepFolder

WORDS = ("strategy=scaffold", "seed=3", "partition.alpha=0.1")


def job(number, status, round=-1, accuracy=None, failures=0, **about):
    ended = 112.0 if status in ("completed", "failed") else None
    about = {"rounds": 30, "began": 100.0, "ended": ended, **about}
    report = JobReport(number, f"{number}_job", WORDS, status, **about)
    return Job(report, WORDS, round, score({"accuracy": accuracy}), failures)


def completed(number, accuracy=0.9, **about):
    figures = {"accuracy": accuracy, "best_accuracy": 0.95, "rounds": 30, "loss": 0.5 + number}
    return job(number, "completed", 30, accuracy, figures=figures, **about)


def shown_by(width, *snapshots, terminal=True):
    file = io.StringIO()
    size = {"width": width, "height": 14}
    display = display_for(Console(file=file, force_terminal=terminal, color_system=None, **size))
    for snapshot in snapshots:
        display.show(snapshot)
    return file.getvalue()


def ended(*jobs, objective="accuracy", direction=None):
    file = io.StringIO()
    snapshot, folder = Snapshot(jobs, len(jobs), 9.0), Path("/results/of/a_sweep")
    summary = closing_summary(snapshot, folder, objective, direction)
    Console(file=file, width=80).print(summary, soft_wrap=True)
    return file.getvalue()


def test_a_terminal_shows_counts_total_and_a_bar_for_each_running_job():
    jobs = [completed(0), job(1, "failed", error="a reason " * 20)]
    jobs += [job(2, "running", 15, accuracy=0.8421, failures=2), job(3, "running")]
    snapshot = Snapshot([*jobs, job(4, "waiting")], total=8, seconds=100.0)
    assert shown_by(80, Snapshot([], 8, 0.0)) == ""  # an error of the launcher may come first
    text = shown_by(80, snapshot, snapshot)
    total, first, second = text.rpartition("\x1b[2K")[2].splitlines()
    assert total.startswith("8 jobs: 1 done, 1 failed, 2 running, 1 waiting ")
    assert total.endswith(" 31 %, 0:03:40 left")  # 2.5 of 8 jobs
    assert first.startswith("#2 scaffold seed=3 alpha=0.1 ")
    assert first.endswith(" 15/30 84.21 % 2 failures")
    assert second.endswith(" starting")
    [line] = [line for line in text.splitlines() if "failed   #1" in line]  # once
    assert len(line.rpartition("failed   #1")[2]) < 80
    jobs = [job(number, "running", 3, accuracy=0.5, failures=12) for number in range(50)]
    for width in (60, 200):
        text = shown_by(width, Snapshot(jobs, total=100, seconds=10_000.0))
        lines = text.rpartition("\x1b[2K")[2].splitlines()
        assert (len(lines), max(map(len, lines)) <= width) == (1 + 10, True)  # of 14 lines


def test_a_log_gets_a_line_for_each_job_that_ends_and_for_long_ones_each_minute():
    jobs = [completed(0), job(1, "failed", error="no data"), completed(2, began=None)]
    begun = Snapshot([job(0, "running", 3)], 3, 1.0)
    lines = shown_by(80, begun, Snapshot(jobs[:2], 3, 2.0), Snapshot(jobs, 3, 3.0), terminal=False)
    assert lines.splitlines() == [
        "[1/3] #0 scaffold seed=3 alpha=0.1: 90.00 %, 30 rounds, 12 s",
        "[2/3] #1 scaffold seed=3 alpha=0.1: failed: no data",
        "[3/3] #2 scaffold seed=3 alpha=0.1: 90.00 %, 30 rounds, earlier",
    ]
    long = [job(0, "running", 3, accuracy=0.5)]
    snapshots = [Snapshot(long, 3, float(seconds)) for seconds in range(0, 150, 10)]
    lines = shown_by(80, *snapshots, terminal=False)
    assert lines == "      #0 scaffold seed=3 alpha=0.1: 3/30 50.00 %\n" * 2


def test_the_summary_of_a_search_has_the_best_trial():
    jobs = [completed(0, 0.5), completed(1, 0.75), completed(2, 0.75), job(3, "failed")]
    words = "strategy=scaffold seed=3 partition.alpha=0.1"
    assert f"best     #1 accuracy 0.75: {words}\n" in ended(*jobs, direction="maximize")
    least = ended(*jobs, objective="loss", direction="minimize")
    assert f"best     #0 loss 0.5: {words}\n" in least
    assert "0.5 30 12 s" in " ".join(least.split())  # the objective has a column
    assert "best     " not in ended(jobs[3], direction="maximize")


def test_the_progress_of_a_running_job_is_read_from_its_metrics(tmp_path):
    folder = SweepFolder(tmp_path)
    folder.write(Sweep(overrides=(), began="now"))
    follower = SweepFollower(folder, total=2, varied=["seed", "strategy.mu"])
    assert not follower.snapshot().jobs  # nothing has begun
    words = ["task=digits", "seed=3", "+strategy.mu=0.123456789"]
    folder.report(JobReport(0, "0_job", words, "running", rounds=10, began=1.0))
    metrics = tmp_path / "0_job" / "metrics.jsonl"
    metrics.parent.mkdir()
    assert follower.snapshot().jobs[0].round == -1
    rows = '{"round": 0, "accuracy": 0.1}\n{"round": 1, "failures": ["a", "b"]}\n'
    metrics.write_text(rows + '{"round": 2, "acc')
    [seen] = follower.snapshot().jobs
    assert (seen.round, seen.score[1], seen.failures) == (1, "10.00 %", 2)
    assert (seen.label, seen.share) == ("seed=3 mu=0.1235", 0.1)
    metrics.write_text(metrics.read_text() + 'uracy": 0.5}\n')
    assert follower.snapshot().jobs[0].score == ("accuracy", "50.00 %")
    metrics.write_bytes(bytes(100) + b"\n" + metrics.read_bytes())  # a damaged disk
    assert follower.snapshot().jobs[0].round == -1  # the job itself will say what is wrong
    words = ["seed=20240101"]
    folder.report(JobReport(0, "0_job", words, "waiting", rounds=10, began=1.0))
    assert follower.snapshot().jobs[0].label == "seed=20240101"
    folder.report(JobReport(0, "0_fedavg", ["task=digits"], "waiting", rounds=10, began=1.0))
    assert follower.snapshot().jobs[0].label == "0_fedavg"  # no words tell it apart
