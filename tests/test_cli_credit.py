"""`evenhand credit`, `audit` and `estimators`, end to end."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from builders import rollout
from evenhand.cli import main
from evenhand.credit import ESTIMATORS
from evenhand.trajectory import read_trajectories, write_trajectories
from test_credit import CALIBADV, CASES, credits_match

CASE = CASES / "calibadv" / "case0.jsonl"


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    rows = [
        rollout(f"g{g}-{r}", f"g{g}", float(r % 2), results=[["a", f"b{r}"]] * (r % 3))
        for g in range(4)
        for r in range(6)
    ]
    write_trajectories(path, rows)
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "evenhand", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("case", CALIBADV, ids=lambda case: case["file"])
def test_calibadv_reproduces_the_original_code_on_the_command_line(
    case: dict, tmp_path: Path
) -> None:
    options = [f"--set={key}={value}" for key, value in case.items() if key != "file"]
    out = tmp_path / "credited.jsonl"
    source = CASES / "calibadv" / case["file"]
    assert run("credit", source, "-e", "calibadv", *options, "-o", out) == 0
    assert credits_match(read_trajectories(out)) == 40


@pytest.mark.parametrize(
    "settings",
    [
        "alpha=0.3 ddof=0 eps=0 lone=global scope=batch balance=2 rescale=negative "
        "only_when_negative_dominates=true step_score=count_max threshold=0.5 "
        "max_think_similarity=none stratum=searches_capped:2"
    ],
)
def test_every_setting_of_the_combined_estimator_is_taken(
    rollouts: Path, settings: str, capsys: pytest.CaptureFixture
) -> None:
    options = [f"--set={item}" for item in settings.split()]
    assert run("credit", rollouts, "-e", "stratified_calibadv", *options) == 0
    assert run("credit", rollouts, "-e", "stratified_shrunk", "--set", "kappa=1.5") == 0
    out = capsys.readouterr().out
    assert "alpha=0.3" in out
    assert "kappa=1.5" in out
    assert "normalised over whole batches" in out


def test_the_summary_counts_groups_strata_and_masses(
    rollouts: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("credit", rollouts, "-e", "grpo") == 0
    out = capsys.readouterr().out
    assert "24 rollouts, 4 groups, 12 strata" in out
    assert "4 effective, 0 too easy, 0 too hard" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1].isalpha()}
    assert rows["answer"][:2] == ["24", "192"]
    assert rows["search"][:2] == ["24", "240"]
    assert rows["all"][:2] == ["48", "432"]


def test_standard_output_carries_only_trajectories(
    rollouts: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("credit", rollouts, "-e", "grpo", "-o", "-") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 24
    assert all(json.loads(line)["segments"][-1]["advantage"] != 0 for line in lines)
    assert "24 rollouts" in captured.err


def test_a_pipe_reads_standard_input_and_gives_plain_text(rollouts: Path) -> None:
    with rollouts.open() as source:
        first = process("credit", "-", "-e", "calibadv", "-o", "-", stdin=source)
    assert first.returncode == 0
    second = process("credit", "-", "-e", "grpo", input=first.stdout)
    assert second.returncode == 0
    assert "24 rollouts" in second.stdout
    assert "\x1b" not in first.stdout + first.stderr + second.stdout


def test_a_reader_that_goes_away_is_no_error(rollouts: Path) -> None:
    many = rollouts.with_name("many.jsonl")
    write_trajectories(many, [rollout(f"r{n}", f"g{n // 4}", n % 2) for n in range(4000)])
    command = f"{sys.executable} -m evenhand credit {many} -e grpo -o - | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == "" or "rollouts" in done.stderr


def test_gzip_goes_in_and_out(rollouts: Path, tmp_path: Path) -> None:
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(rollouts.read_bytes()))
    assert run("credit", packed, "-e", "grpo", "-o", tmp_path / "out.jsonl.gz") == 0
    assert len(list(read_trajectories(tmp_path / "out.jsonl.gz"))) == 24


def bad(text: str) -> str:
    return json.dumps({"schema": "evenhand.trajectory/1", "id": "x"}) if text == "field" else text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["credit", "{missing}", "-e", "grpo"], "does not exist"),
        (["credit", "{folder}", "-e", "grpo"], "is a directory"),
        (["credit", "{empty}", "-e", "grpo"], "holds no trajectory"),
        (["credit", "{broken}", "-e", "grpo"], "line 25: not JSON"),
        (["credit", "{field}", "-e", "grpo"], "line 25: field group is missing"),
        (["credit", "{good}", "-e", "gpro"], "did you mean 'grpo'"),
        (["credit", "{good}", "-e", "grpo", "--set", "alpha=1"], "unknown setting 'alpha'"),
        (["credit", "{good}", "-e", "grpo", "--set", "alpha"], "expected key=value, got 'alpha'"),
        (["credit", "{good}", "-e", "grpo", "-o", "{folder}"], "is a directory"),
        (["credit", "{good}", "-e", "grpo", "-o", "{folder}/no/x"], "cannot write"),
        (["credit", "{good}"], "Missing option '--estimator'"),
        (["credit"], "Missing argument"),
        (["audit"], "Missing argument"),
        (["audit", "{missing}"], "does not exist"),
        (["audit", "{good}", "--set", "balance=1"], "unknown setting 'balance'"),
        (["audit", "{good}", "--html", "{folder}"], "is a directory"),
        (["audit", "{good}", "--form", "x"], "No such option"),
        (["auditt"], "No such command 'auditt'"),
    ],
)
def test_wrong_use_and_bad_input_end_with_one_line_and_code_2(
    arguments: list[str], message: str, rollouts: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = rollouts.parent
    places = {"missing": folder / "none", "folder": folder, "good": rollouts}
    for name in ("empty", "broken", "field"):
        places[name] = folder / f"{name}.jsonl"
        tail = {"empty": "", "broken": '{"schema": ', "field": bad("field")}[name]
        places[name].write_text("" if name == "empty" else rollouts.read_text() + tail)
    out = folder / "out.jsonl"
    filled = [argument.format(**places) for argument in arguments]
    if filled[0] == "credit" and len(filled) > 1 and "-o" not in filled and "-e" in filled:
        filled += ["-o", str(out)]
    assert main(filled) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not out.exists()
    assert not list(folder.glob(".*.tmp"))


def test_groups_of_one_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "alone.jsonl"
    write_trajectories(path, [rollout(f"r{n}", f"g{n}", n % 2) for n in range(6)])
    assert run("credit", path, "-e", "stratified_calibadv") == 0
    assert capsys.readouterr().out.count("every group has a single member") == 1


def test_the_table_of_estimators_is_complete(capsys: pytest.CaptureFixture) -> None:
    assert run("estimators") == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in ESTIMATORS)
    assert run("estimators", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == list(ESTIMATORS)
    assert rows[0]["settings"] == {"ddof": 1, "eps": 1e-6}


def test_the_audit_shows_every_estimator_and_what_it_cannot_know(
    rollouts: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("audit", rollouts) == 0
    out = capsys.readouterr().out
    for name in ESTIMATORS:
        assert len(re.findall(rf"^{name} ", out, re.MULTILINE)) == 2
    for part in ("24 in 4 groups of 6", "What stands out", "What these files cannot tell"):
        assert part in out


def test_what_a_file_says_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "x[red].jsonl"
    rows = [rollout(f"r{n}", reward=float(n % 2)) for n in range(4)]
    rows = [replace(t, metadata={"n_tokens_unit": "[/tokens] :cat:"}) for t in rows]
    write_trajectories(path, rows)
    out = tmp_path / "out[red].jsonl"
    assert run("credit", path, "-e", "grpo", "-o", out) == 0
    assert run("audit", path) == 0
    captured = capsys.readouterr()
    assert captured.out.count("[/tokens] :cat:") >= 3
    assert f"wrote {out}" in captured.err


def test_a_pipe_of_another_encoding_gets_what_it_can_hold() -> None:
    done = process("audit", CASE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "What stands out" in done.stdout


def test_groups_of_one_say_so_once_in_the_audit(tmp_path: Path) -> None:
    path = tmp_path / "alone.jsonl"
    write_trajectories(path, [rollout(f"r{n}", f"g{n}", n % 2) for n in range(6)])
    done = process("audit", path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("Every group has a single member") == 1


def test_rewards_missing_everywhere_are_unknown_on_the_page(tmp_path: Path) -> None:
    path, page = tmp_path / "none.jsonl", tmp_path / "page.html"
    write_trajectories(path, [rollout(f"r{n}", reward=None, results=[["a"]]) for n in range(3)])
    assert run("audit", path, "--html", page) == 0
    text = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    assert "nan" not in re.split(r"[^a-z]+", text.lower())
    assert "<b>unknown</b>" in text


def test_the_figures_come_as_json(rollouts: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("audit", rollouts, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trajectories"] == 24
    assert {row["name"] for row in found["estimators"]} == set(ESTIMATORS)


def test_the_page_is_self_contained_and_escapes_what_it_shows(
    tmp_path: Path,
) -> None:
    evil = "<script>alert(1)</script>"
    rows = [
        rollout("good", "g", 1.0, results=[["a"]]),
        rollout(evil, "g", 0.0, results=[["a", evil]]),
    ]
    path, page = tmp_path / "evil.jsonl", tmp_path / "page.html"
    write_trajectories(path, rows)
    assert run("audit", path, "--html", page) == 0
    text = page.read_text()
    assert text.count("<script") == 1  # its own, which the policy names by its hash
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.search(r'(src|href)="(?!data:,)', text)
    assert text.count("<svg") >= 5
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower().split()


def test_help_credit_and_audit_work_without_torch_and_start_quickly() -> None:
    code = (
        "import sys; from evenhand.cli import main; main(['--help']); "
        f"main(['credit', {str(CASE)!r}, '-e', 'calibadv']); main(['audit', {str(CASE)!r}]); "
        "heavy = {'torch', 'transformers', 'pyarrow', 'fastapi', 'bm25s', 'httpx', 'jinja2'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "COLUMNS": "100"})  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_version_is_shown(capsys: pytest.CaptureFixture) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("evenhand 0.")
