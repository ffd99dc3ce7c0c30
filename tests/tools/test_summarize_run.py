"""The run table: aligned, tolerant of missing figures, and honest about missing files."""

import json

from tools.summarize_run import format_table, main

ROWS = [
    {
        "step": 0,
        "stage": "generate",
        "reward/mean": 0.25,
        "reward/format": 1.0,
        "ratio/text_mean": 1.0,
        "ratio/image_mean": 0.98765,
        "time/step": 12.345,
        "eval/reward/mean": 0.5,
    },
    {"step": 10, "stage": "refine", "reward/mean": None, "time/step": 3},
    {"step": 11},
]


def write_run(folder, rows):
    """A run folder with these metrics."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_table_is_aligned_and_dashes_stand_for_what_is_missing():
    table = format_table(ROWS)
    assert table == [
        "step     stage  reward  format  ratio text/image  step time (s)",
        "   0  generate   0.250    1.00     1.0000/0.9877          12.35",
        "  10    refine       -       -               -/-           3.00",
        "  11         -       -       -               -/-              -",
    ]


def test_run_is_printed_with_evaluation_and_outputs(tmp_path, capsys):
    write_run(tmp_path, ROWS)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").touch()
    (tmp_path / "checkpoints" / "step_8").mkdir(parents=True)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:6] == ["evaluation at step 0", "  eval/reward/mean  0.500"]
    assert f"report       {tmp_path / 'report' / 'index.html'}" in lines
    assert f"checkpoint   {tmp_path / 'checkpoints' / 'step_8'}" in lines


def test_last_steps_only(tmp_path, capsys):
    write_run(tmp_path, ROWS)
    assert main([str(tmp_path), "--last", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == "11" and lines[2] == "evaluation at step 0"
    assert "report       none was written" in lines


def test_half_a_line_at_the_end_is_left_out(tmp_path, capsys):
    write_run(tmp_path, ROWS[:1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    assert main([str(tmp_path)]) == 0
    assert "\n   1 " not in capsys.readouterr().out


def test_a_folder_without_metrics_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "is this a run folder?" in capsys.readouterr().err
