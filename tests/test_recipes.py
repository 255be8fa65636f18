"""Recipes: what is read, what is refused, and that the refusal says where, what and what to write instead."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_post import recipes
from jaxrl_post.config import Config, Model
from jaxrl_post.config_offline import config_class
from jaxrl_post.recipe_errors import SYNONYMS, all_keys
from jaxrl_post.recipes import RecipeError

CONFIGS = Path(__file__).parent.parent / "configs"
MODEL = "model: {random: {}}\n"


@pytest.fixture
def recipe(tmp_path):
    """A function that loads the given text as a recipe file, with overrides."""

    def load(text: str | bytes, *overrides: str) -> Config:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return recipes.load(path, overrides)

    return load


def refusal(recipe, text, *overrides) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe(text, *overrides)
    return str(caught.value)


# --- values


def test_defaults_are_those_of_the_schema(recipe):
    assert recipe("model: {path: somewhere}") == Config(model=Model(path="somewhere"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("1.e-5", 1e-5), (".5", 0.5), ("1e+3", 1000.0), ("0.1", 0.1), ("3", 3.0)],
)
def test_numbers_are_those_of_yaml_1_2(recipe, text, value):
    assert recipe(MODEL + f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate == value
    assert recipe(MODEL, f"optimizer.learning_rate={text}").optimizer.learning_rate == value


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("0x10", 16), ("0o10", 8), ("+7", 7)])
def test_integers_are_decimal_unless_marked(recipe, text, value):
    assert recipe(MODEL + f"seed: {text}").seed == value


@pytest.mark.parametrize("word", ["yes", "no", "on", "1:30", "2026-01-01", "1_000"])
def test_yaml_1_1_words_stay_text(recipe, word):
    assert recipe(MODEL + f"run_dir: {word}").run_dir == word


def test_a_byte_order_mark_is_not_part_of_the_first_key(recipe):
    assert recipe(b"\xef\xbb\xbf" + MODEL.encode()) == recipe(MODEL)


# --- overrides


def test_overrides_replace_what_the_file_says_and_make_missing_sections(recipe):
    config = recipe(MODEL + "seed: 1\nmesh: {tensor: 2}\n", "seed=7", "checkpoint.every=3", "data.task.high=4")
    assert (config.seed, config.checkpoint.every, config.data.task.high, config.mesh.tensor) == (7, 3, 4, 2)


def test_an_override_of_a_section_replaces_all_of_it(recipe):
    task = "data.task={kind: jsonl, path: rows.jsonl}"
    config = recipe(MODEL + "data: {task: {low: 3, high: 5}, prompts_per_step: 2}", task)
    assert config.data.task.path == "rows.jsonl"
    assert config.data.prompts_per_step == 2


def test_one_model_source_replaces_the_other(recipe):
    assert recipe(MODEL, "model.path=folder", "model.random=null").model == Model(path="folder")
    assert "model.random=null" in refusal(recipe, MODEL, "model.path=folder")


@pytest.mark.parametrize("override", ["seed", "=3", "", "--seed=3", "seed =3", "a..b=1", "optimizer.=1", "1=2"])
def test_malformed_overrides_are_refused(recipe, override):
    message = refusal(recipe, MODEL, override)
    assert repr(override) in message
    assert "section.key=value" in message


@pytest.mark.parametrize(
    "pair", [("seed=1", "seed=2"), ("seed=1", "seed=1"), ("optimizer={b1: 0.5}", "optimizer.b2=0.5")]
)
def test_overrides_of_one_key_twice_are_refused(recipe, pair):
    message = refusal(recipe, MODEL, *pair)
    assert all(repr(text) in message for text in pair)


def test_an_override_below_a_value_is_refused(recipe):
    assert "seed is 1, a value and not a section" in refusal(recipe, MODEL + "seed: 1", "seed.x=2")


def test_an_override_loses_nothing_to_a_comment(recipe):
    text = "What is {a} + {b}? #1 question"
    assert "comment" in refusal(recipe, MODEL, f"data.task.template={text}")
    assert recipe(MODEL, f'data.task.template="{text}"').data.task.template == text


def test_an_override_that_is_no_yaml_says_to_quote(recipe):
    assert "quote" in refusal(recipe, MODEL, "data.task.template={a} + {b}")


# --- keys that do not exist


@pytest.mark.parametrize(
    ("text", "overrides", "key", "meant"),
    [
        ("optimizer:\n  learning_rte: 1e-5\n", (), "optimizer.learning_rte", "optimizer.learning_rate"),
        ("learning_rate: 1e-5\n", (), "learning_rate", "optimizer.learning_rate"),
        ("", ("optimizer.learning_rte=1",), "optimizer.learning_rte", "optimizer.learning_rate"),
        ("", ("optimiser.learning_rate=1",), "optimiser", "optimizer"),
        ("", ("rollout.steps=1",), "rollout.steps", "steps"),
        ("", ("rollout.samples=1",), "rollout.samples", "rollout.samples_per_prompt"),
        ("", ("num_generations=4",), "num_generations", "rollout.samples_per_prompt"),
        ("", ("optimizer.lr=4",), "optimizer.lr", "optimizer.learning_rate"),
        ("", ("model.random.head_dimension=4",), "model.random.head_dimension", "model.random.head_dim"),
        ("mesh: {tensr: 2}", (), "mesh.tensr", "mesh.tensor"),
    ],
)
def test_a_key_that_does_not_exist_names_the_nearest_that_does(recipe, text, overrides, key, meant):
    message = refusal(recipe, MODEL + text, *overrides)
    assert f" {key}: no such key" in message
    assert f"Did you mean {meant}?" in message


def test_an_unknown_key_names_its_section_its_line_and_the_keys_there(recipe):
    message = refusal(recipe, MODEL + "\nmesh:\n  pipeline: 2\n")
    assert "in section mesh (value 2)" in message
    assert "Keys there: data, fsdp, expert, sequence, tensor" in message
    assert "[line 4]" in message


def test_a_key_of_another_kind_says_which(recipe):
    message = refusal(recipe, MODEL, "data.task={kind: jsonl, path: x, low: 1}")
    assert "data.task.low: no such key in section data.task of kind jsonl" in message
    assert "it belongs to kind arithmetic" in message


def test_a_dotted_key_in_a_file_says_how_to_nest_it(recipe):
    assert "Write b1 under section optimizer" in refusal(recipe, MODEL + "optimizer.b1: 0.5")


def test_all_problems_are_reported_at_once(recipe):
    message = refusal(recipe, MODEL + "seed: -1\nrollout:\n  top_p: 1.5\n", "stepps=3")
    assert "3 problems" in message
    for key, origin in (("seed", "line 2"), ("rollout.top_p", "line 4"), ("stepps", "override stepps=3")):
        assert re.search(rf"^  {key}: .*\[{origin}\]$", message, re.MULTILINE)


def test_every_synonym_points_at_a_key_that_exists(recipe):
    offline = MODEL + "data: {path: rows.jsonl}\nalgorithm: {kind: dpo}\n"
    for target in SYNONYMS.values():
        answers = [refusal(recipe, text, f"{target}={{wrong: type}}") for text in (MODEL, offline)]
        assert not all(f"{target}: no such key" in answer for answer in answers), target


def test_the_table_of_other_systems_keys_names_keys_that_exist():
    schemas = [config_class({"algorithm": {"kind": kind}}) for kind in ("grpo", "dpo")]
    known = {".".join(keys) for schema in schemas for keys in all_keys(schema, ())}
    named = [key for *_, here in foreign_keys() for key in here]
    assert len(named) > 40
    assert set(named) <= known


def test_a_foreign_key_is_answered_as_the_table_says():
    told = {}
    for foreign, here in foreign_keys():
        for key in foreign:
            told.setdefault(key.rsplit(".", 1)[-1], []).extend(here)
    both = told.keys() & SYNONYMS.keys()
    assert len(both) > 20
    for name in both:
        assert any(f"{key}.".startswith(f"{SYNONYMS[name]}.") for key in told[name]), name


def foreign_keys():
    """Of each line of docs/keys.md, the keys of other systems and those here."""
    rows = [row.split("|") for row in (CONFIGS.parent / "docs" / "keys.md").read_text().splitlines() if "|" in row]
    quoted = lambda text: re.findall(r"`([^`]+)`", text)
    return [(quoted(verl) + quoted(trl), quoted(here)) for _, verl, trl, here, *_ in rows[2:]]


# --- values that are not allowed


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "optimizer.learning_rate='1e-5'",
            ['optimizer.learning_rate: "1e-5"', "section optimizer", "remove the quotes"],
        ),
        ("optimizer.learning_rate=fast", ['"fast"', "valid number"]),
        ("optimizer.learning_rate=-1", ["greater than or equal to 0"]),
        ("optimizer.learning_rate=.nan", ["finite"]),
        ("optimizer.max_grad_norm=.inf", ["finite"]),
        ("steps=0", ["greater than 0"]),
        ("steps=1e3", ["integer", "write 1000"]),
        ("steps=true", ["integer"]),
        ("steps=", ["null", "integer"]),
        ("seed=4294967296", ["less than 4294967296"]),
        ("run_dir=2024", ["text", 'write "2024"']),
        ("dump_rollouts=yes", ["boolean", "true or false"]),
        ("rollout.top_p=0", ["greater than 0"]),
        ("rollout.stop_token_ids=[1, x]", ["rollout.stop_token_ids.1", '"x"']),
        ("rollout.stop_token_ids=3", ["must be a list"]),
        ("algorithm.kind=grop", ["is not one of grpo", "Did you mean grpo?"]),
        ("algorithm.kind=gpro", ["Did you mean grpo?"]),
        ("algorithm.aggregation=tokenmean", ["'token-sum'", "Did you mean token-mean?"]),
        ("data.task.kind=arithmatic", ["jsonl", "Did you mean arithmetic?"]),
        ("data.task={kind: jsonl}", ["data.task.path: required", "One JSON object a line"]),
        ("optimizer=", ["this section is empty"]),
        ("optimizer=3", ["this is a section, with keys learning_rate"]),
        ("reward={kind: function, function: os.system}", ["reward.function", "'os.system'", "module:function"]),
        ("reward={kind: function, function: 'rewards.py:score'}", ["give rewards:score", "started in"]),
        ("reward={kind: function, function: my/rewards.py}", ["give rewards:FUNCTION", "my, which PYTHONPATH"]),
        ("reward={kind: function, function: 'a:b', timeout: -1}", ["reward.timeout: -1", "greater than 0"]),
        ("data.task.template=What is {a}?", ["{a} and {b}"]),
        ("data.task.template='{a} {b} {c}'", ["{a}, {b} and {op}"]),
    ],
)
def test_a_value_that_is_not_allowed_says_what_is(recipe, override, parts):
    message = refusal(recipe, MODEL, override)
    missing = [part for part in [*parts, f"[override {override}]"] if part not in message]
    assert not missing, message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["mesh.data=0"], ["mesh.data=0"]),
        (["mesh.data=-1"], ["data and fsdp", "only one"]),
        (["model.random={heads: 3}"], ["heads=3", "kv_heads=2"]),
        (["model.random.head_dim=5"], ["head_dim=5", "even"]),
        (["data.task.low=5", "data.task.high=4"], ["high=4", "low=5"]),
        (["algorithm.mini_batches=3"], ["data.prompts_per_step=8", "algorithm.mini_batches=3"]),
        (
            ["data.curriculum={}", "rollout.samples_per_prompt=1", "algorithm.kind=remax"],
            ["rollout.samples_per_prompt=1", "data.curriculum=null"],
        ),
        (["data.curriculum={chance: 1.0}"], ["data.curriculum.chance", "less than 1"]),
        (["rollout.refill=3"], ["rollout.refill=3", "rollout.samples_per_prompt=8"]),
        (["rollout.refill=8", "rollout.slots=4"], ["rollout.refill=8", "rollout.slots=4"]),
        (["rollout.temperature=0"], ["rollout.temperature=0"]),
        (["rollout.top_k=5"], ["rollout.top_k=5", "algorithm.old_logprobs=trainer"]),
        (["training.row_length=100"], ["training.row_length=100", "128"]),
        (["rollout.max_new_tokens=5000"], ["training.tokens_per_microbatch=4096", "at least 5064"]),
        (["algorithm.loss_scale_length=9"], ["algorithm.aggregation=seq-mean-token-sum-norm"]),
        (["reward.kind=reasoning_gym"], ["data.task.kind=reasoning_gym", "arithmetic"]),
    ],
)
def test_arithmetic_that_cannot_be_is_refused(recipe, overrides, parts):
    message = refusal(recipe, MODEL, *overrides)
    assert [part for part in parts if part not in message] == []


# --- files that are no recipes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty"]),
        ("# only a comment\n", ["empty"]),
        ("- a\n- b\n", ["mapping", "a list"]),
        ("just words", ["mapping", "a single value"]),
        (b"\xff\xfe\x00m", ["not UTF-8"]),
        (b"\x00\x01", ["special characters"]),
        (b"a" * (1 << 21), ["bytes"]),
        (MODEL + "seed: 1\nseed: 2\n", ["line 3", "seed is given twice", "line 2"]),
        (MODEL + "optimizer: {b1: 0.9, b1: 0.8}", ["optimizer.b1 is given twice"]),
        (MODEL + "data:\n  task: {low: 1}\nseed: 1\ndata: {}\n", ["data is given twice"]),
        ("model: [1\n", ["line 2"]),
        ("a: b: c", ["line 1, column 5"]),
        ("\tmodel: 1", ["line 1"]),
        (MODEL + "---\n" + MODEL, ["single document"]),
        ("model: &m {random: {}}", ["anchors"]),
        ("model: !!python/object/apply:os.system [ls]", ["constructor"]),
        ("1: 2", ["a key must be a name"]),
        ("? [a]\n: 2", ["a key must be a name"]),
        ("[" * 5000, ["nested"]),
        (MODEL + "seed: " + "9" * 5000, ["integer"]),
        ("{}", ["model: required"]),
        ("model: {}", ["exactly one of model.path"]),
    ],
)
def test_what_is_no_recipe_is_refused_with_a_reason(recipe, text, parts):
    message = refusal(recipe, text)
    assert [part for part in parts if part not in message] == []


def test_a_missing_file_names_the_nearest_and_a_folder_its_config(tmp_path):
    (tmp_path / "config.yaml").write_text(MODEL)
    with pytest.raises(RecipeError, match=r"no recipe at .*confg.yaml; did you mean .*/config.yaml\?"):
        recipes.load(tmp_path / "confg.yaml")
    with pytest.raises(RecipeError, match=r"is a folder, not a recipe; did you mean .*/config.yaml\?"):
        recipes.load(tmp_path)


# --- references


def test_references_take_the_type_of_what_they_name_and_see_overrides_and_defaults(recipe):
    text = MODEL + "seed: ${rollout.top_k}\nrun_dir: runs/${optimizer.learning_rate}-${steps}\n"
    config = recipe(text, "optimizer.learning_rate=1e-5", "rollout.top_k=3", "algorithm.old_logprobs=trainer")
    assert config.seed == 3
    assert config.run_dir == "runs/1e-05-100"


@pytest.mark.parametrize(
    "text",
    ["${oc.env:HOME}", "${env:HOME}", "a ${oc.env:PATH,x}", "${oc.decode:1}", "${a.${seed}}", "${", "${}", "${seed"],
)
def test_references_reach_nothing_but_keys(recipe, text):
    assert "only another key" in refusal(recipe, MODEL + f"run_dir: '{text}'")


def test_a_reference_to_nothing_or_to_itself_is_refused(recipe):
    assert "run_dir: Interpolation key 'nope' not found" in refusal(recipe, MODEL, "run_dir=${nope}")
    assert "run_dir" in refusal(recipe, MODEL, "run_dir=a${run_dir}")
    assert "data" in refusal(recipe, MODEL, "data={task: '${data}'}")


# --- writing


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    run_dir=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
    | st.sampled_from(
        ["1e-5", "null", "010", "true", "~", "", "a\nb", "${seed}", "\\${seed}", "\\\\${x", "???", "a #b"]
    ),
    rate=st.floats(0, 1e3),
    seed=st.integers(0, 2**32 - 1),
)
def test_dump_reads_back_as_an_equal_config(recipe, run_dir, rate, seed):
    config = Config(model=Model(path="m"), run_dir=run_dir, seed=seed, optimizer={"learning_rate": rate})
    assert recipe(recipes.dump(config)) == config


def test_dump_writes_defaults_too():
    assert "max_grad_norm: 1.0" in recipes.dump(Config(model=Model(path="m")))


def test_dump_reads_back_every_kind(recipe):
    options = "{a: 1, b: 1.0, c: true, d: '1'}"
    config = recipe(
        MODEL, f"data.task={{kind: reasoning_gym, dataset: x, options: {options}}}", "reward.kind=reasoning_gym"
    )
    assert [type(value) for value in config.data.task.options.values()] == [int, float, bool, str]
    assert recipe(recipes.dump(config)) == config


# --- what ships


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_and_name_the_schema(path):
    recipes.load(path)
    header = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", path.read_text().splitlines()[0])
    assert header is not None
    assert (path.parent / header[1]).resolve() == (CONFIGS / "schema.json").resolve()


def test_the_schema_file_is_up_to_date():
    written = json.loads((CONFIGS / "schema.json").read_text())
    assert written == recipes.schema(), "run: python -m jaxrl_post.recipes > configs/schema.json"
    rate = written["$defs"]["Optimizer"]["properties"]["learning_rate"]
    assert (rate["default"], rate["minimum"], rate["type"]) == (1e-6, 0.0, "number")


def test_the_tiny_recipe_keeps_its_promises():
    config = recipes.load(CONFIGS / "tiny" / "grpo.yaml")
    assert config.steps >= 6
    assert config.checkpoint.every == 1
    assert config.model.random is not None


def test_what_changes_between_two_configs_is_told_by_key_old_and_new(recipe):
    old, new = (recipes.dump(recipe(MODEL, *words)) for words in ([], ["steps=9", "rollout.stop=[a]", "mesh.fsdp=2"]))
    assert recipes.changes(old, new) == ["steps: 100 → 9", "mesh.fsdp: -1 → 2", 'rollout.stop: [] → ["a"]']
    assert recipes.changes(old, old) == []
    assert len(recipes.changes("[[", new)) == 1
