"""`evenhand train`, `export` and `ask` through the command line; kills; full disks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import settings

from evenhand.cli import main
from evenhand.cli.train_summary import Clock, show_summary
from evenhand.training.recipes import recipe_from, write_recipe
from evenhand.training.run_folder import RunFolder
from evenhand.trajectory import read_trajectories

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.train, pytest.mark.usefixtures("one_thread")]

HERE = Path(__file__).parent
HOT = {"rollout__temperature": 1.6}


def recipe_file(world: Path, path: Path, **changes: Any) -> Path:
    write_recipe(path, recipe_from(settings(world, **(HOT | changes))))
    return path


def environment() -> dict[str, str]:
    paths = [str(HERE), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def run(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    recipe = recipe_file(tiny_world, folder / "r.toml", steps=2, optimizer__lr=1e-4)
    assert main(["train", str(recipe), "--out", str(folder / "run")]) == 0
    return folder / "run"


# --- train ---------------------------------------------------------------------------------------


def test_train_echoes_the_recipe_and_prints_a_line_a_step(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tiny_world, tmp_path / "r.toml", steps=2)
    arguments = ["train", str(recipe), "--set", "optimizer.lr=0.003", "--out", str(tmp_path / "o")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "lr = 0.003" in out
    assert out.count("step 1/2  reward") == out.count("step 2/2  reward") == 1
    assert "evaluation after step 0: exact match" in out
    assert "  1 hops: exact match" in out
    assert "evaluation after step 2: exact match" in out
    assert re.search(r"^took: \d+ s on the clock, \d+ CPU seconds$", out, re.MULTILINE)
    assert f"run folder: {tmp_path / 'o'}" in out
    assert "lr = 0.003" in (tmp_path / "o" / "recipe.toml").read_text()


def test_a_run_ends_with_what_changed_on_the_held_out_questions(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_summary(RunFolder.open(run), Clock.start())
    out = capsys.readouterr().out
    sides = [run / "evaluations" / f"step-00000{step}.jsonl.gz" for step in (0, 2)]
    assert main(["compare", *map(str, sides), "--metric", "exact_match"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match("questions", line)]
    assert len(rows) > 2
    assert all(row in out.splitlines() for row in rows)
    assert f"report with plots: {run / 'report.html'}" in out
    assert "<svg" in (run / "report.html").read_text(encoding="utf-8")


def test_a_damaged_evaluation_costs_the_comparison_only(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "evaluations" / "step-000002.jsonl.gz").write_bytes(b"{")
    show_summary(RunFolder.open(copy), Clock.start())
    captured = capsys.readouterr()
    assert "warning: no comparison of evaluations: " in captured.err
    assert f"run folder: {copy}" in captured.out


def test_a_misspelt_key_ends_before_a_folder_is_made(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tiny_world, tmp_path / "r.toml")
    arguments = [
        "train",
        str(recipe),
        "--set",
        "rollout.group_sise=4",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(arguments) == 2
    assert "did you mean 'rollout.group_size'" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_recipe_that_cannot_be_used_leaves_no_run_behind(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tiny_world, tmp_path / "r.toml", model__path="/no/such/folder", steps=1)
    out = ["--out", str(tmp_path / "o")]
    assert main(["train", str(recipe), *out]) == 2
    assert "is no folder" in capsys.readouterr().err
    model = f"model.path={tiny_world / 'model'}"
    assert main(["train", str(recipe), *out, "--set", model]) == 0


def test_train_warns_of_doubtful_combinations(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"credit__estimator": "calibadv", "loss__aggregation": "sequence_mean"}
    recipe = recipe_file(tiny_world, tmp_path / "r.toml", steps=1, **changes)
    assert main(["train", str(recipe), "--out", str(tmp_path / "o")]) == 0
    assert "balances sums over tokens" in capsys.readouterr().err


def test_seeds_make_one_family_that_goes_on_where_it_was(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tiny_world, tmp_path / "r.toml", steps=1)
    arguments = ["train", str(recipe), "--seeds", "0,1", "--out", str(tmp_path / "family")]
    assert main(arguments) == 0
    names = sorted(path.name for path in (tmp_path / "family").iterdir())
    assert names == ["report.html", "seed-0", "seed-1"]
    out = capsys.readouterr().out
    lines = [x for x in out.splitlines() if re.match(r"[01] +[01]\.\d{3} +[01]\.\d{3} ", x)]
    assert len(lines) == 2
    assert "median gain in exact match over 2 seeds: " in out
    assert "nan" not in out  # where no question changed there is no interval
    folders = [tmp_path / "family" / f"seed-{n}" for n in (0, 1)]
    one, other = ((path / "trajectories" / "step-000001.jsonl.gz").read_bytes() for path in folders)
    assert one != other
    assert "seed = 1" in (folders[1] / "recipe.toml").read_text()
    first = (folders[1] / "metrics.jsonl").read_bytes()
    assert main(arguments) == 0
    assert (folders[1] / "metrics.jsonl").read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "give a recipe"),
        (["train", "--resume", "nowhere"], "nowhere is no run"),
        (["train", "r.toml", "--resume", "x"], "--resume takes the recipe"),
        (["train", "--set", "steps=1", "--seeds", "0,zero"], "--seeds takes different whole"),
        (["train", "--set", "steps=1", "--seeds", "1,1"], "--seeds takes different whole"),
        (["export", "nowhere", "-o", "y"], "nowhere is no run"),
        (["ask", "who?"], "give either --run RUN or --model DIR"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


# --- export and ask ------------------------------------------------------------------------------


def test_an_exported_model_is_loaded_by_transformers_and_has_the_trained_weights(
    run: Path, tmp_path: Path
) -> None:
    from evenhand.training.setup import load_trained

    assert main(["export", str(run), "-o", str(tmp_path / "m")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    trained = load_trained(run, device="cpu")[0].model
    written = model.state_dict()
    assert all(torch.equal(written[name], value) for name, value in weights(run).items())
    ids = torch.tensor([tokenizer.encode("who made the lamp ?")])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_an_adapter_is_folded_into_the_exported_weights(tiny_world: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from evenhand.training.setup import load_trained

    recipe = recipe_file(tiny_world, tmp_path / "r.toml", steps=2, model__lora={"rank": 2})
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "m")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert not any("lora" in name for name, _ in model.named_parameters())
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        trained = load_trained(tmp_path / "run", device="cpu")[0].model(input_ids=ids).logits
        assert torch.allclose(model(input_ids=ids).logits, trained, atol=1e-5)
        start = transformers.AutoModelForCausalLM.from_pretrained(tiny_world / "model")
        assert not torch.allclose(start(input_ids=ids).logits, trained, atol=1e-5)


def test_export_does_not_overwrite(run: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert main(["export", str(run), "-o", str(tmp_path / "m")]) == 2


def test_ask_shows_thinking_searches_documents_and_answer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The taught policy searches under this seed; what it says is its own.
    for seed in range(20):
        arguments = ["ask", "who made the lamp ?", "--run", str(run), "--temperature", "1",
                     "--seed", str(seed)]  # fmt: skip
        assert main(arguments) == 0
        out = capsys.readouterr().out
        if "lamp  Anna made the lamp" in out:
            break
    assert "<think>" in out
    assert "<search>" in out
    assert out.index("<search>") < out.index("lamp  Anna made the lamp")


def test_ask_takes_an_exported_model_with_its_recipe(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "m")]) == 0
    assert main(["ask", "who made the mill ?", "--model", str(tmp_path / "m")]) == 0
    first = capsys.readouterr().out
    assert main(["ask", "who made the mill ?", "--run", str(run)]) == 0
    assert capsys.readouterr().out in first


# --- kills ---------------------------------------------------------------------------------------


def weights(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    path = max((run / "checkpoints").glob("step-*"))
    return load_file(path / "weights.safetensors")  # type: ignore[no-any-return]


def expect_kills_change_nothing(
    world: Path, tmp_path: Path, *, steps: int, kills: int, seed: int
) -> tuple[int, int]:
    """Compare a run through kills with one without; return the hits, and those inside a write."""
    recipe = recipe_file(world, tmp_path / "r.toml", steps=steps)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(whole)]) == 0
    process = subprocess.run(
        [sys.executable, str(HERE / "kill_driver.py"), str(recipe), str(run), str(kills),
         str(seed)],
        env=environment(), capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, second = weights(whole), weights(run)
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps + 1))
    names = sorted(path.name for path in (run / "trajectories").iterdir())
    assert names == [f"step-{step:06d}.jsonl.gz" for step in range(1, steps + 1)]
    ids = [t.id for name in names for t in read_trajectories(run / "trajectories" / name)]
    assert len(ids) == len(set(ids)) == 8 * steps
    for folder in ("trajectories", "evaluations"):
        files = [sorted((side / folder).iterdir()) for side in (whole, run)]
        assert [path.name for path in files[0]] == [path.name for path in files[1]]
        for one, other in zip(*files, strict=True):
            assert one.read_bytes() == other.read_bytes()
    words = process.stdout.split()
    return int(words[-3]), int(words[-1])


def test_kill_9_and_resume_give_the_weights_of_an_uninterrupted_run(
    tiny_world: Path, tmp_path: Path
) -> None:
    # PeterGriffinJin/Search-R1 #36, #86, #120, #136: no way to resume an interrupted run.
    hit, inside = expect_kills_change_nothing(tiny_world, tmp_path, steps=3, kills=4, seed=1)
    assert hit >= 2
    assert inside >= 1


@pytest.mark.slow
def test_twenty_kills_some_inside_a_checkpoint_change_nothing(
    tiny_world: Path, tmp_path: Path
) -> None:
    hit, inside = expect_kills_change_nothing(tiny_world, tmp_path, steps=24, kills=24, seed=2)
    assert hit >= 20
    assert inside >= 5


# --- disks ---------------------------------------------------------------------------------------

FULL = """
import resource, signal, sys
from pathlib import Path
from evenhand.training import checkpoint
save = checkpoint.Checkpoints.save
def limited(self, trained, progress):
    if progress.step == 2:
        # Files beyond this size cannot be written, as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return save(self, trained, progress)
checkpoint.Checkpoints.save = limited
from evenhand.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_ends_with_one_line_and_the_last_checkpoint_whole(
    tiny_world: Path, tmp_path: Path
) -> None:
    recipe = recipe_file(tiny_world, tmp_path / "r.toml", steps=5)
    process = subprocess.run(
        [sys.executable, "-c", FULL, "train", str(recipe), "--out", str(tmp_path / "run")],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "step-000002 could not be written" in process.stderr
    assert "free some space" in process.stderr
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000000", "step-000001"]
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert main(["train", str(recipe), "--out", str(tmp_path / "whole")]) == 0
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_a_folder_that_cannot_be_made_is_one_line(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tiny_world, tmp_path / "r.toml")
    (tmp_path / "file").write_text("")
    assert main(["train", str(recipe), "--out", str(tmp_path / "file" / "run")]) == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err
    assert err.count("\n") == 1
