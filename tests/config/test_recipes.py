"""A recipe gives the values that options start from; what a user names wins over it."""

import dataclasses

import pytest

from megahedge.config.mixer import MixerConfig
from megahedge.config.options import RECIPES, OptimOptions, Stage1Options, Stage2Options, read_recipe
from megahedge.utils.cli import parse_options
from megahedge.utils.errors import InputError
from tests.training.runs import ds_config

STAGES = {"stage1": Stage1Options, "stage2": Stage2Options}
REQUIRED = {"stage1": {"ds_config": ds_config("zero1")}, "stage2": {"ds_config": ds_config("zero1"), "init_from": "runs/one"}}


def make(stage: str, **changes):
    return STAGES[stage](**(REQUIRED[stage] | changes))


def parse(stage: str, *words: str):
    required = [word for name, value in REQUIRED[stage].items() for word in (f"--{name}", value)]
    return parse_options(STAGES[stage], [*required, *words])


def mixer_fields(options_type: type) -> set[str]:
    """Options of the mixer that the command has."""
    return {field.name for field in dataclasses.fields(MixerConfig)} & {field.name for field in dataclasses.fields(options_type)}


# ---- the files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_recipe_shows_every_value_of_mixer_loss_and_optimizer(recipe, stage):
    trained = {field.name for field in dataclasses.fields(OptimOptions)} | {"train_tokens", "seq_len", "global_batch_size"}
    own = {"stage1": {"match_inputs", "match_targets", "match_loss"}, "stage2": {"mixer", "kd_alpha", "kd_temperature", "lr_new"}}
    assert set(read_recipe(recipe)) == set(STAGES)
    assert set(read_recipe(recipe)[stage]) == mixer_fields(STAGES[stage]) | trained | own[stage]


@pytest.mark.parametrize("stage", STAGES)
def test_the_defaults_are_the_paper_recipe(stage):
    defaults = make(stage)
    values = read_recipe("paper")[stage]
    assert {name: getattr(defaults, name) for name in values} == values
    assert defaults.recipe == "paper"
    assert parse(stage) == defaults


def test_the_paper_recipe_has_the_papers_budget():
    first, second = make("stage1"), make("stage2")
    assert (first.train_steps, second.train_steps) == (20_000, 180_000)
    assert first.tokens_per_step == second.tokens_per_step == 49_152
    assert (first.lr, second.lr) == (1e-2, 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_stages_of_a_recipe_have_the_same_feature_map(recipe):
    """Stage 2 refuses any other."""
    first, second = (parse(stage, "--recipe", recipe) for stage in STAGES)
    assert first.mixer_config("hedgehog").feature_map() == second.mixer_config("hedge_mamba").feature_map()


@pytest.mark.parametrize("stage", STAGES)
def test_the_tuned_recipe_differs_as_it_says(stage):
    tuned = parse(stage, "--recipe", "tuned")
    assert tuned.rope == "before" and tuned.feature_map_per_head
    if stage == "stage1":
        assert tuned.match_inputs == "teacher"
    else:
        assert (tuned.decay, tuned.decay_step, tuned.decay_per_head) == ("head", "auto", True)
        assert tuned.mixer_config("hedge_mamba").decay_step == "head"
        assert tuned.kd_alpha > 0 and tuned.lr_new > tuned.lr


# ---- what wins ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_recipe_sets_all_its_values(stage, recipe):
    options, values = parse(stage, "--recipe", recipe), read_recipe(recipe)[stage]
    assert {name: getattr(options, name) for name in values} == values
    assert options.recipe == recipe


def test_an_option_on_the_command_line_wins_over_the_recipe():
    tuned = read_recipe("tuned")["stage1"]
    for words in (["--rope", "after", "--recipe", "tuned"], ["--recipe", "tuned", "--rope", "after"]):
        options = parse("stage1", *words)
        assert options.rope == "after" and options.match_inputs == tuned["match_inputs"]
    assert not parse("stage1", "--recipe", "tuned", "--no_feature_map_per_head").feature_map_per_head
    assert parse("stage2", "--recipe", "tuned", "--lr_new", "0.5", "--train_tokens", "1M").lr_new == 0.5


def test_a_config_file_wins_over_the_recipe_and_may_name_it(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("recipe: tuned\nrope: after\nkd_alpha: 0.25\n")
    options = parse("stage2", "--config", str(path), "--kd_alpha", "0.5")
    assert (options.recipe, options.rope, options.kd_alpha) == ("tuned", "after", 0.5)
    assert options.decay == read_recipe("tuned")["stage2"]["decay"]
    path.write_text("rope: after\n")
    assert parse("stage2", "--recipe", "tuned", "--config", str(path)).rope == "after"


def test_a_value_equal_to_the_default_still_wins_over_the_recipe():
    assert make("stage2").kd_alpha == 0.0
    assert parse("stage2", "--recipe", "tuned", "--kd_alpha", "0").kd_alpha == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_an_unknown_recipe_is_refused(stage):
    with pytest.raises(InputError, match="--recipe=fast is not known; use paper or tuned"):
        parse(stage, "--recipe", "fast")
    with pytest.raises(InputError, match="--recipe=fast is not known"):
        make(stage, recipe="fast")


# ---- values that are refused --------------------------------------------------------------------------------------------------

BAD = [
    ("stage1", "match_inputs", "both", "student or teacher"),
    ("stage1", "match_targets", "logits", "block or mixer"),
    ("stage1", "match_loss", "l1", "cosine, mse or cosine_mse"),
    ("stage1", "rope", "never", "before or after"),
    ("stage1", "normalizer_eps", 0.0, "positive"),
    ("stage1", "lr", -1.0, "positive"),
    ("stage1", "train_tokens", 7, "one step"),
    ("stage2", "mixer", "softmax", "hedge_mamba or mamba"),
    ("stage2", "mixer", "mamba2", "hedge_mamba or mamba"),
    ("stage2", "decay", "matrix", "channel"),
    ("stage2", "decay_step", "head", "channel or state"),
    ("stage2", "decay_rank", -1, "at least 0"),
    ("stage2", "decay_init", -0.5, "not negative"),
    ("stage2", "conv_kernel", -4, "at least 0"),
    ("stage2", "normalizer_eps", -1.0, "positive"),
    ("stage2", "lr_new", 0.0, "positive"),
    ("stage2", "lr_new", float("nan"), "positive and at most 1e+06"),
    ("stage2", "kd_alpha", 1.5, "between 0 and 1"),
    ("stage2", "kd_alpha", -0.1, "between 0 and 1"),
    ("stage2", "kd_temperature", 0.0, "positive"),
    ("stage2", "kd_temperature", float("inf"), "finite"),
    ("stage2", "dtype", "fp16", "bf16 or fp32"),
]


@pytest.mark.parametrize(("stage", "name", "value", "remedy"), BAD, ids=str)
def test_a_bad_value_is_refused_naming_option_value_and_what_works(stage, name, value, remedy):
    with pytest.raises(InputError) as error:
        make(stage, **{name: value})
    message = str(error.value)
    assert f"{name}={value}" in message.replace("'", "") and remedy in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init_from": None}, ["--init_from=None", "--stage1_steps=None", "--stage1_steps 0"]),
        ({"init_from": None, "stage1_steps": 5}, ["--init_from=None", "--stage1_steps=5"]),
        ({"init_from": "runs/one", "stage1_steps": 0}, ["--init_from=runs/one", "--stage1_steps=0"]),
        ({"init_from": "runs/one", "stage1_steps": -1}, ["--stage1_steps=-1", "at least 0"]),
        ({"init_from": None, "stage1_steps": 0}, ["--teacher"]),
        ({"mixer": "mamba"}, ["--mixer=mamba", "--init_from=runs/one", "--stage1_steps 0"]),
    ],
)
def test_a_start_that_is_neither_a_run_nor_a_teacher_is_refused(changes, words):
    with pytest.raises(InputError) as error:
        make("stage2", **changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stage1_steps": 20_000},
        {"teacher": "t"},
        {"init_from": None, "stage1_steps": 0, "teacher": "t"},
        {"init_from": None, "stage1_steps": 0, "teacher": "t", "mixer": "mamba"},
    ],
    ids=str,
)
def test_a_start_from_a_run_or_from_a_teacher_is_accepted(changes):
    assert make("stage2", **changes)


# ---- from options to the mixer ------------------------------------------------------------------------------------------------


def test_stage_2s_options_are_all_of_a_mixers():
    assert mixer_fields(Stage2Options) == {field.name for field in dataclasses.fields(MixerConfig)} - {"kind"}
    assert mixer_fields(Stage1Options) == set(MixerConfig.FEATURE_MAP_FIELDS)


def test_a_mixer_has_the_values_of_the_options():
    given = dict(
        rope="before", decay="state", decay_step="head", decay_per_head=True, conv_kernel=3, gate=False, bypass=True, decay_init=0.5
    )
    mixer = make("stage2", **given).mixer_config("hedge_mamba")
    assert mixer == MixerConfig(kind="hedge_mamba", **given)
    assert make("stage1", rope="before").mixer_config("hedgehog") == MixerConfig(kind="hedgehog", rope="before")


def test_defaults_of_the_options_are_the_mixers():
    assert make("stage2").mixer_config("hedge_mamba") == MixerConfig(kind="hedge_mamba")


@pytest.mark.parametrize(
    ("given", "told"),
    [({"rope": "sideways"}, r"--rope='sideways' is not known; use before or after"), ({"conv_kernel": -1}, r"--conv_kernel=-1 must")],
)
def test_what_a_mixer_refuses_is_told_by_the_option(given, told):
    with pytest.raises(InputError, match=told):
        make("stage2", **given)
