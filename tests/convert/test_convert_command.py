from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from convert_samples import DATA, converted
from typer.testing import CliRunner

from evenhand.cli.convert import convert
from evenhand.core.errors import ConfigError, DataError
from evenhand.trajectory import parse_line, read_trajectories

app = typer.Typer()
app.command()(convert)


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_a_trajectory_file(tmp_path):
    out = tmp_path / "out.jsonl.gz"
    result = run(DATA / "searchr1.jsonl", "-o", out)
    assert result.exit_code == 0
    assert list(read_trajectories(out)) == converted("searchr1.jsonl")


def test_the_summary_says_what_was_read(tmp_path):
    result = run(DATA / "searchr1.jsonl", DATA / "train_data_step3.jsonl", "-o", tmp_path / "o")
    assert result.stderr.strip() == (
        "9 rollouts in 3 groups; from nemo-rl and searchr1; n_tokens in characters and tokens; "
        f"1 without a reward; 5 without accepted answers; wrote {tmp_path / 'o'}"
    )


def test_standard_output_gets_lines_and_standard_error_the_summary():
    result = run(DATA / "7.jsonl", "-o", "-")
    assert [parse_line(line, "line") for line in result.stdout.splitlines()] == converted("7.jsonl")
    assert result.stderr.startswith("4 rollouts in 2 groups")


def test_the_lines_are_utf8_in_any_locale(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Où?", "response": "là"}) + "\n", encoding="utf-8")
    code = (
        "import typer; from evenhand.cli.convert import convert; a = typer.Typer(); "
        "a.command()(convert); a()"
    )
    result = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, str(path), "-o", "-"],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C", "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"},
    )
    assert "là" in result.stdout.decode("utf-8")


def test_a_failed_conversion_leaves_the_earlier_file(tmp_path):
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    bad.write_bytes((DATA / "7.jsonl").read_bytes() + b"{")
    out.write_text("earlier", encoding="utf-8")
    result = run(bad, "-o", out)
    assert isinstance(result.exception, DataError)
    assert out.read_text("utf-8") == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "out.jsonl"]


def test_an_unknown_format_is_refused(tmp_path):
    result = run(DATA / "7.jsonl", "-o", tmp_path / "o", "--from", "verle")
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize("name", ["evenhand", "nemo-rl", "verl", "trl", "calibadv", "searchr1"])
def test_the_help_names_every_format(name):
    assert name in run("--help").stdout
