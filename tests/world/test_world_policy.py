from __future__ import annotations

import json

import numpy as np
import pytest

from evenhand.core.errors import ConfigError
from evenhand.task.rewards import exact_match
from evenhand.world import (
    NameSplit,
    QuestionKind,
    build_fast_tokenizer,
    generate_world,
)
from evenhand.world.measure import roll_out, summarise
from evenhand.world.policy import save_policy
from evenhand.world.pretrain import CURRICULUM, Stage, pretrain
from evenhand.world.sequences import copy_drill
from evenhand.world.skills import Skill
from evenhand.world.tokenizer import vocabulary

pytestmark = pytest.mark.train

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("bm25s")

from evenhand.world import WARMSTART, build_retriever, load_policy, new_policy  # noqa: E402

QUICK = (
    Stage(name="copy", tokens=1000, copy=1.0, most_facts=2),
    Stage(name="habits", tokens=1000, reading=0.3, skills={Skill.HASTY: 1.0}),
)


@pytest.fixture
def _small_pools(monkeypatch):
    monkeypatch.setattr("evenhand.world.pretrain._POOL", 8)


def pools(run):
    lines = (run / "log.jsonl").read_text().splitlines()
    return [(json.loads(line)["stage"], json.loads(line)["pool"]) for line in lines]


def weights(folder):
    return load_policy(folder)[0].state_dict()


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def warm_start():
    if not (WARMSTART / "config.json").is_file():
        pytest.skip("no warm start in the package")
    return load_policy()


@pytest.fixture(scope="module")
def world():
    return generate_world(11, size=300, split=NameSplit.EVAL)


def test_a_policy_is_an_ordinary_small_llama_with_heads_of_32():
    policy = new_policy()
    assert 500_000 < sum(weight.numel() for weight in policy.parameters()) < 2_000_000
    assert policy.config.model_type == "llama"
    assert policy.config.hidden_size // policy.config.num_attention_heads == 32


def test_a_new_policy_depends_on_its_seed_alone():
    torch.manual_seed(1)
    one = new_policy(seed=3).state_dict()
    torch.manual_seed(2)
    assert same(one, new_policy(seed=3).state_dict())
    assert not same(one, new_policy(seed=4).state_dict())


@pytest.mark.parametrize(
    "shape", [{"hidden": 100}, {"hidden": 64}, {"layers": 1}], ids=["100 wide", "64 wide", "flat"]
)
def test_a_shape_that_cannot_be_wired_is_refused(shape):
    with pytest.raises(ConfigError, match="multiple of the head size 32, at least 96"):
        new_policy(**shape)


def test_a_new_policy_attends_one_two_and_three_tokens_back():
    policy = new_policy(seed=5)
    policy.set_attn_implementation("eager")
    ids = torch.randint(3, len(vocabulary()), (1, 200), generator=torch.manual_seed(0))
    attention = policy(input_ids=ids, output_attentions=True).attentions[0][0]
    places = torch.arange(5, 200)
    for head in range(3):
        assert attention[head, places, places - head - 1].median() > 0.5


def test_a_new_policy_attends_to_the_value_of_a_fact_that_it_read():
    policy, random = new_policy(seed=5), np.random.default_rng(0)
    policy.set_attn_implementation("eager")
    found = []
    for _ in range(50):
        drill = copy_drill(random, 8)
        ids = torch.from_numpy(drill.ids)[None]
        attention = policy(input_ids=ids, output_attentions=True).attentions[1][0, :3].mean(0)
        for at in np.flatnonzero(drill.value):
            place = int(attention[at - 1, :at].argmax())
            found.append(drill.ids[place] == drill.ids[at])
    assert np.mean(found) > 0.5


def test_a_saved_policy_loads_to_the_same_and_reads_in_transformers_4_too(tmp_path):
    policy = new_policy(seed=2)
    save_policy(policy, tmp_path)
    loaded, tokenizer = load_policy(tmp_path)
    assert same(policy.state_dict(), loaded.state_dict())
    assert loaded.config.rope_parameters["rope_theta"] == 1e6
    assert tokenizer.convert_tokens_to_ids("</answer>") == vocabulary()["</answer>"]
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e6
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no policy"):
        load_policy(tmp_path)


@pytest.mark.usefixtures("_small_pools")
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = pretrain(tmp_path / "whole", curriculum=QUICK)
    while True:
        part = pretrain(tmp_path / "parts", curriculum=QUICK, budget_seconds=0.0)
        done = json.loads((part / "manifest.json").read_text())["progress"]["stage"]
        if done == len(QUICK):
            break
    assert same(weights(whole), weights(part))
    assert not (whole / "optimizer.safetensors").exists()
    assert pools(tmp_path / "parts") == pools(tmp_path / "whole")
    assert len(pools(tmp_path / "whole")) > 3


@pytest.mark.usefixtures("_small_pools")
def test_a_run_folder_of_another_seed_is_refused(tmp_path):
    pretrain(tmp_path, curriculum=QUICK, budget_seconds=0.0)
    with pytest.raises(ConfigError, match="another seed or curriculum"):
        pretrain(tmp_path, curriculum=QUICK, seed=1)


@pytest.mark.usefixtures("_small_pools")
def test_a_run_that_died_between_two_renames_goes_on_from_the_checkpoint_before(tmp_path):
    pretrain(tmp_path, curriculum=QUICK, budget_seconds=0.0)
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.previous")
    pretrain(tmp_path, curriculum=QUICK, budget_seconds=0.0)
    assert len(set(pools(tmp_path))) == 2


@pytest.mark.usefixtures("_small_pools")
def test_a_resumed_run_forgets_what_the_log_says_of_pools_after_its_checkpoint(tmp_path):
    pretrain(tmp_path, curriculum=QUICK, budget_seconds=0.0)
    before = (tmp_path / "log.jsonl").read_text()
    late = {"stage": "habits", "pool": 9, "tokens": 10**9}
    (tmp_path / "log.jsonl").write_text(before + json.dumps(late) + '\n{"stage": "ha')
    pretrain(tmp_path, curriculum=QUICK, budget_seconds=0.0)
    after = (tmp_path / "log.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 2
    assert ("habits", 9) not in pools(tmp_path)


def test_greedy_rollouts_do_not_depend_on_their_batch(world):
    policy, tokenizer = new_policy(seed=1).eval(), build_fast_tokenizer()
    questions, retriever = world.questions(12), build_retriever(world)
    one = roll_out(policy, tokenizer, questions, retriever, rows=12)
    other = roll_out(policy, tokenizer, questions, retriever, rows=5)
    assert [[s.text for s in r.segments] for r in one] == [
        [s.text for s in r.segments] for r in other
    ]


def test_the_manifest_of_the_warm_start_says_how_it_was_made():
    if not (WARMSTART / "manifest.json").is_file():
        pytest.skip("no warm start in the package")
    manifest = json.loads((WARMSTART / "manifest.json").read_text())
    assert [stage["name"] for stage in manifest["recipe"]["curriculum"]] == [
        stage.name for stage in CURRICULUM
    ]
    assert manifest["progress"]["stage"] == len(CURRICULUM)


def test_the_warm_start_obeys_the_format_and_searches_about_once(warm_start, world):
    questions = world.questions(150)
    rollouts = roll_out(*warm_start, questions, build_retriever(world), temperature=1.0)
    everything = summarise(questions, rollouts)[0]
    assert everything.format_ok.value > 0.9
    assert 0.7 < everything.searches < 1.6
    assert 0.02 < everything.several.value < 0.5


def test_the_warm_start_answers_held_out_one_hop_questions(warm_start, world):
    questions = world.questions(100, shares={QuestionKind.HOP1: 1.0})
    rollouts = roll_out(*warm_start, questions, build_retriever(world))
    assert sum(map(exact_match, rollouts)) / 100 >= 0.6


def test_the_warm_start_leaves_room_for_more_hops(warm_start, world):
    questions = world.questions(100, shares={QuestionKind.HOP2: 1.0})
    rollouts = roll_out(*warm_start, questions, build_retriever(world), temperature=1.0)
    assert 0.02 < sum(map(exact_match, rollouts)) / 100 < 0.6
