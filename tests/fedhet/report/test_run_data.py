"""Reading results directories, whole and broken ones."""

import json

from fedhet.report.run_data import find_runs, read_run


def test_a_whole_run(finished_run):
    run = finished_run("scaffold", 3, (0.1, 0.5), columns={"train_loss": 1.25, "lr": float("nan")})
    assert (run.method, run.seed, run.status, run.error) == ("scaffold", 3, "completed", "")
    assert run.settings["partition.alpha"] == 0.1
    assert run.settings["strategy.methods.scaffold"] == []
    assert run.points("accuracy") == [(0, 0.1), (1, 0.5)]
    assert run.points("train_loss") == [(1, 1.25)]
    assert run.points("lr") == run.points("unheard_of") == []
    assert run.points("clients") == [(1, 2)]  # how many ids there are
    assert "failures" not in run.columns
    assert run.bytes_until(1) == 3_000_000


def test_an_incomplete_last_line_is_left_out_and_a_missing_summary_means_unfinished(write_run):
    folder = write_run("fedprox", 1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    run = read_run(folder, "a", 0)
    assert run.status == "completed"
    assert run.columns["round"] == [0, 1, 2, 3]
    (folder / "summary.json").unlink()
    run = read_run(folder, "a", 0)
    assert (run.method, run.seed, run.status) == ("fedprox", 1, "unfinished")
    assert "it has no summary.json" in run.error
    assert len(run.points("accuracy")) == 4


def test_files_that_cannot_be_read_are_named(write_run):
    broken = write_run()
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    (broken / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", lines[2]]) + "\n")
    run = read_run(broken, "a", 0)
    assert run.status == "unfinished"
    assert "its metrics.jsonl cannot be read" in run.error

    (broken / "config.yaml").write_text("a: [1\n")
    (broken / "summary.json").write_text('{"status": "compl')
    run = read_run(broken, "a", 0)
    assert run.method == "unknown"
    assert "config.yaml" in run.error
    assert "summary.json" in run.error

    (broken / "metrics.jsonl").write_text('{"accuracy": 0.5}\n')
    assert "lines without a round" in read_run(broken, "a", 0).error


def test_a_copy_that_was_cut_short_is_unfinished_and_refused_replies_have_their_round(write_run):
    folder = write_run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[2]["failures"] = ["client 7: update holds NaN"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    run = read_run(folder, "a", 0)
    assert run.status == "unfinished"
    assert run.error == "its metrics.jsonl has 2 rounds, and its summary.json says 3"
    assert run.refusals == ["round 2: client 7: update holds NaN"]


def test_runs_are_found_in_the_order_of_their_numbers(write_run, tmp_path):
    for number in (0, 10, 9, 2):
        write_run(name=f"{number}_fedavg")
    sweep = tmp_path / "sweep"
    for beside in ("report", "replaced"):  # `--resume` puts a run of another recipe there
        (sweep / beside).mkdir()
        (sweep / beside / "summary.json").touch()
    (sweep / "log.txt").touch()
    (sweep / "3_fedavg").mkdir()  # it failed before it wrote results
    (sweep / "3_fedavg" / "log.txt").touch()
    found = [folder.name for folder in find_runs(sweep)]
    assert found == ["0_fedavg", "2_fedavg", "3_fedavg", "9_fedavg", "10_fedavg"]
    assert list(find_runs(sweep / "2_fedavg")) == [sweep / "2_fedavg"]
