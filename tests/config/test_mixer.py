"""What a MixerConfig accepts, how it is kept, and the sizes of the paper's models."""

import dataclasses
import json
import re

import pytest
import torch

from megahedge.config.mixer import STEP_AXES, MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.sharding import full_numel
from megahedge.utils.errors import InputError

# ---- parameter counts (Attention to Mamba, table of the ablation) -------------------------------------------------------------

PYTHIA_1B = dict(vocab_size=50304, hidden_size=2048, num_layers=16, num_heads=8, intermediate_size=8192)
ADDED = {"decay": "none", "conv_kernel": 0, "gate": False}
PAPER_COUNTS = {
    "teacher": (dict(kind="softmax"), 1012, 1_011_781_632),
    "Hedgehog": (dict(kind="hedgehog"), 1014, 1_013_886_976),
    "nothing added": (dict(kind="hedge_mamba", **ADDED), 1014, 1_013_886_976),
    "+ SSM": (dict(kind="hedge_mamba", **(ADDED | {"decay": "channel"})), 1020, None),
    "+ SSM + convolution": (dict(kind="hedge_mamba", gate=False), 1020, None),
    "+ SSM + convolution + gate": (dict(kind="hedge_mamba"), 1087, None),
    "+ SSM + convolution + bypass": (dict(kind="hedge_mamba", gate=False, bypass=True), 1087, None),
}


def count_of(**options) -> int:
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(**PYTHIA_1B, mixer=MixerConfig(**options)))
    return sum(full_numel(parameter) for parameter in model.parameters())


@pytest.mark.parametrize(("options", "millions", "exactly"), PAPER_COUNTS.values(), ids=PAPER_COUNTS)
def test_a_model_of_pythia_1b_has_the_papers_parameter_count(options, millions, exactly):
    count = count_of(**options)
    assert round(count / 1e6) == millions
    assert exactly in (None, count)


def test_a_bypass_has_as_many_parameters_as_the_gate():
    """16 layers of a matrix and a bias."""
    bare, gate, bypass = (count_of(kind="hedge_mamba", **ADDED | added) for added in ({}, {"gate": True}, {"bypass": True}))
    assert gate - bare == bypass - bare == 16 * 2048 * 2049


def test_signs_that_are_not_tied_would_give_another_count():
    assert round(count_of(kind="hedge_mamba", decay_tie_signs=False) / 1e6) == 1088


# ---- what is accepted ---------------------------------------------------------------------------------------------------------

BAD = [
    ({"kind": "rwkv"}, "kind='rwkv'", "softmax, hedgehog, hedge_mamba or mamba"),
    ({"rope": "never"}, "rope='never'", "before or after"),
    ({"decay": "matrix"}, "decay='matrix'", "head"),
    ({"decay": "head", "decay_step": "channel"}, "decay_step='channel'", "use head"),
    ({"decay": "state", "decay_step": "channel"}, "decay_step='channel'", "state or head"),
    ({"decay": "channel", "decay_step": "head"}, "decay_step='head'", "channel or state"),
    ({"decay_rank": -1}, "decay_rank=-1", "at least 0"),
    ({"decay_rank": 1.5}, "decay_rank=1.5", "whole number"),
    ({"conv_kernel": -1}, "conv_kernel=-1", "at least 0"),
    ({"normalizer_eps": 0.0}, "normalizer_eps=0.0", "positive"),
    ({"normalizer_eps": float("nan")}, "normalizer_eps=nan", "finite"),
    ({"normalizer_eps": float("inf")}, "normalizer_eps=inf", "finite"),
    ({"decay_init": -0.1}, "decay_init=-0.1", "not negative"),
    ({"decay_init": float("inf")}, "decay_init=inf", "finite"),
]


@pytest.mark.parametrize(("options", "named", "remedy"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_option_is_refused_naming_field_value_and_what_works(options, named, remedy):
    with pytest.raises(InputError) as error:
        MixerConfig(kind="hedge_mamba", **options) if "kind" not in options else MixerConfig(**options)
    assert named in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize(("structure", "axis"), [(structure, axis) for structure, axes in STEP_AXES.items() for axis in axes])
def test_every_structure_takes_the_axes_of_its_step(structure, axis):
    assert MixerConfig(decay=structure, decay_step=axis).decay_step == axis


def test_the_defaults_are_listing_2():
    mixer = MixerConfig(kind="hedge_mamba")
    assert not mixer.feature_map_per_head and not mixer.feature_map_scale and mixer.rope == "after"
    assert (mixer.decay, mixer.decay_step, mixer.decay_per_head, mixer.decay_tie_signs) == ("channel", "channel", False, True)
    assert (mixer.decay_init, mixer.conv_kernel, mixer.gate, mixer.bypass) == (0.0, 4, True, False)
    assert MixerConfig().kind == "softmax"


# ---- records ------------------------------------------------------------------------------------------------------------------

OTHER = dict(
    kind="hedge_mamba",
    feature_map_per_head=True,
    feature_map_scale=True,
    rope="before",
    normalizer_eps=1e-5,
    decay="state",
    decay_step="head",
    decay_per_head=True,
    decay_tie_signs=False,
    decay_init=0.25,
    decay_rank=8,
    conv_kernel=3,
    gate=False,
    bypass=True,
)


def test_a_model_config_with_its_mixer_survives_json():
    assert set(OTHER) == {field.name for field in dataclasses.fields(MixerConfig)}  # no field escapes
    config = ModelConfig(**PYTHIA_1B, mixer=MixerConfig(**OTHER))
    record = json.loads(json.dumps(dataclasses.asdict(config)))
    assert ModelConfig.from_record(record) == config
    assert record["mixer"] == OTHER


def test_a_record_from_before_the_bypass_has_none():
    record = dataclasses.asdict(ModelConfig(**PYTHIA_1B, mixer=MixerConfig(kind="hedge_mamba")))
    del record["mixer"]["bypass"]
    assert ModelConfig.from_record(record).mixer == MixerConfig(kind="hedge_mamba", bypass=False)


@pytest.mark.parametrize("change", [lambda record: record.pop("mixer"), lambda record: record["mixer"].update(unknown=1)])
def test_a_record_of_another_version_is_refused(change):
    record = dataclasses.asdict(ModelConfig(**PYTHIA_1B))
    change(record)
    with pytest.raises((KeyError, TypeError)):
        ModelConfig.from_record(record)


def test_another_kind_keeps_all_other_options():
    mixer = MixerConfig(**OTHER)
    assert dataclasses.asdict(mixer.as_kind("hedgehog")) == OTHER | {"kind": "hedgehog"}
    assert mixer.kind == "hedge_mamba"


def test_the_feature_map_is_what_stage_1_decides():
    assert MixerConfig(**OTHER).feature_map() == {
        name: OTHER[name] for name in ("feature_map_per_head", "feature_map_scale", "rope", "normalizer_eps")
    }


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (MixerConfig(), "softmax attention"),
        (MixerConfig(kind="hedge_mamba", bypass=True, gate=False), "hedge_mamba, .* shared by the heads, convolution of 4, bypass"),
        (MixerConfig(kind="hedge_mamba"), "hedge_mamba, .*, gate"),
        (MixerConfig(kind="mamba"), "mamba, Mamba's own initialisation, convolution of 4"),
        (MixerConfig(kind="mamba", conv_kernel=0, gate=True), "mamba, Mamba's own initialisation"),
    ],
)
def test_the_line_for_people_names_what_the_mixer_has(mixer, said):
    assert re.fullmatch(said, mixer.describe())
