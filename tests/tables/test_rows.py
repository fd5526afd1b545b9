"""The paper's rows as scripts/configs describes them: each is planned at the paper's size, with its steps, tokens and parameters."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from megahedge.config.mixer import MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.config.options import Stage1Options, Stage2Options
from megahedge.models.families import FAMILIES
from megahedge.models.language_model import LanguageModel
from megahedge.tables.rows import Row, read_row, read_scale, read_table, table_names
from megahedge.tables.runs import Planner
from megahedge.utils.cli import parse_options
from megahedge.utils.errors import InputError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "scripts" / "configs"
ROWS = sorted(path.stem for path in (CONFIGS / "paper").glob("*.yaml") if path.stem != "base")
STEP = 48 * 1024
SHAPES = {"pythia-160m": (768, 12, 12), "pythia-410m": (1024, 24, 16), "pythia-1b": (2048, 16, 8)}
"""By teacher: hidden size, layers and heads."""
STUDENTS = {
    "hedgehog-50-50": 1014,
    "ssm-50-50": 1020,
    "ssm-conv-50-50": 1020,
    "hedgemamba-50-50": 1087,
    "gate-50-50": 1081,
    "bypass-50-50": 1081,
}
"""Millions of parameters of the student; the first four are the paper's."""


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(read_scale(CONFIGS, "paper"), ROOT / "scripts", Path("runs"))


@functools.cache
def teacher_config(name: str) -> ModelConfig:
    hidden_size, num_layers, num_heads = SHAPES[name]
    published = {"model_type": "gpt_neox", "hidden_size": hidden_size, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    published |= {"intermediate_size": 4 * hidden_size, "vocab_size": 50304, "rotary_pct": 0.25, "max_position_embeddings": 2048}
    return FAMILIES["gpt_neox"].model_config(published | {"use_parallel_residual": True, "tie_word_embeddings": False})


def parsed(row: Row, planner: Planner, monkeypatch) -> tuple[Stage1Options | None, Stage2Options | None]:
    """The options of both stages as their scripts read them."""
    monkeypatch.chdir(ROOT)
    runs = planner.runs(row, seed=1)
    kinds = ((runs.stage1, Stage1Options), (runs.stage2, Stage2Options))
    return tuple(job and parse_options(kind, job.command()[2:]) for job, kind in kinds)


def parameters(teacher: ModelConfig, mixer: MixerConfig) -> dict[str, int]:
    """Numbers of parameters by name."""
    with torch.device("meta"):
        return {name: parameter.numel() for name, parameter in LanguageModel(teacher.with_mixer(mixer)).named_parameters()}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_plans_its_steps_and_tokens(name, planner, monkeypatch):
    row = read_row(CONFIGS, name)
    stage1, stage2 = parsed(row, planner, monkeypatch)
    if not row.trained:
        assert stage1 is None and stage2 is None
        return
    steps = [options.train_tokens // STEP if options else 0 for options in (stage1, stage2)]
    assert steps[0] == round(200_000 * row.budget * row.stage1_share) and sum(steps) == round(200_000 * row.budget)
    for options in filter(None, (stage1, stage2)):
        assert (options.seq_len, options.global_batch_size, options.dtype, options.recipe) == (1024, 48, "bf16", row.recipe)
        assert options.save_interval <= 1000  # hours of eight GPUs
    if stage2 is not None:
        assert (stage2.init_from is None) == (steps[0] == 0) and (stage2.lr_new is not None) == row.separate_rate
        assert stage2.lr == 1e-5 * row.rate_factor


@pytest.mark.parametrize("name", [name for name in ROWS if name.endswith("10-90") and read_row(CONFIGS, name).budget == 1.0])
def test_a_row_of_the_final_split_has_the_steps_of_the_paper(name, planner, monkeypatch):
    stage1, stage2 = parsed(read_row(CONFIGS, name), planner, monkeypatch)
    assert (stage1.train_tokens, stage2.train_tokens) == (20_000 * STEP, 180_000 * STEP)


@pytest.mark.parametrize(("name", "millions"), STUDENTS.items())
def test_the_students_have_the_parameters_of_the_paper(name, millions, planner, monkeypatch):
    row = read_row(CONFIGS, name)
    _, stage2 = parsed(row, planner, monkeypatch)
    counts = parameters(teacher_config(row.teacher), stage2.mixer_config(stage2.mixer))
    assert round(sum(counts.values()) / 1e6) == millions


def test_the_linear_control_has_as_many_parameters_as_the_gate(planner, monkeypatch):
    counts = {}
    for name in ("gate-50-50", "bypass-50-50"):
        _, stage2 = parsed(read_row(CONFIGS, name), planner, monkeypatch)
        counts[name] = sum(parameters(teacher_config("pythia-1b"), stage2.mixer_config("hedge_mamba")).values())
    assert counts["gate-50-50"] == counts["bypass-50-50"]


@pytest.mark.parametrize("name", table_names(CONFIGS))
def test_every_table_holds_the_rows_that_it_compares(name):
    table = read_table(CONFIGS, name)
    assert len({row.name for row in table.rows}) == len(table.rows) and table.compare


def test_every_row_is_in_a_table():
    used = {row.name for name in table_names(CONFIGS) for row in read_table(CONFIGS, name).rows}
    assert used == set(ROWS)


def test_rows_with_the_same_first_stage_share_its_run(planner):
    runs = {name: planner.runs(read_row(CONFIGS, name), seed=1) for name in ROWS}
    assert runs["hedgehog-50-50"].stage1 == runs["hedgemamba-50-50"].stage1 == runs["gate-50-50"].stage1
    assert runs["hedgemamba-10-90"].stage1 != runs["hedgemamba-50-50"].stage1
    assert runs["hedgemamba-10-90"].stage1 != runs["rope-before-10-90"].stage1 != runs["tuned-10-90"].stage1
    jobs = [job for row in runs.values() for job in row.jobs]
    assert len({job.folder for job in jobs}) == len({repr(job) for job in jobs})  # one folder, one set of options


def test_a_table_is_named_with_those_that_there_are():
    with pytest.raises(InputError, match="TABLE=table5 is not known; use table1, table2, table3, table4, table6 or recipes"):
        read_table(CONFIGS, "table5")
    with pytest.raises(InputError, match="--scale=tiny is not known; use paper or small"):
        read_scale(CONFIGS, "tiny")


def test_a_scale_without_the_teacher_of_a_row_is_refused():
    small = Planner(read_scale(CONFIGS, "small"), ROOT / "scripts", Path("runs"))
    with pytest.raises(InputError, match="needs the teacher pythia-410m; the scale small has pythia-1b"):
        small.runs(read_row(CONFIGS, "hedgemamba-10-90-410m"), seed=1)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tokens: 500000", "tokens: many", "tokens='many' is not a count; write it like 500K"),
        ("tokens: 500000", "tokens: -5", "tokens=-5 must be at least 1"),
        ("tokens: 500000", "tokens:", "tokens=None is not a count"),
        ("seq_len: 256", "seq_len: odd", "seq_len='odd' is not a count"),
        ("  seq_len: 256\n", "", "seq_len is missing"),
        ("curve_points: 8", "curve_points: 0", "curve_points=0 must be at least 1"),
        ("curve_points: 8", "curve_points: 1.5", "curve_points=1.5 is not a whole number"),
        ("  paper: {stage1", "  paper: 3\n  other: {stage1", "3 stands where values by name .stage1, stage2, lr_new. belong"),
        ("stage2: 1.0e-4", "stage2: low", "stage2='low' is not a number"),
    ],
)
def test_a_scale_with_a_value_of_another_kind_is_refused(tmp_path, old, new, told):
    text = (CONFIGS / "scales" / "small.yaml").read_text()
    assert old in text
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales" / "odd.yaml").write_text(text.replace(old, new))
    with pytest.raises(InputError, match=told):
        read_scale(tmp_path, "odd")


def test_counts_of_a_scale_are_written_as_on_the_command_line(tmp_path):
    text = (CONFIGS / "scales" / "small.yaml").read_text().replace("tokens: 500000", "tokens: 2M").replace("seq_len: 256", "seq_len: 1K")
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales" / "other.yaml").write_text(text)
    scale = read_scale(tmp_path, "other")
    assert (scale.tokens, scale.common["seq_len"], scale.common["global_batch_size"]) == (2_000_000, 1000, 8)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("stage2:", "stage2=None is not values by name"),
        ("stage1: [rope]", r"stage1=\['rope'\] is not values by name"),
        ("stage1_share: half", "stage1_share='half' is not a number"),
        ("rate_factor: 0", "rate_factor=0 must be above 0"),
        ("ours: 1", "ours=1 is not true or false"),
    ],
)
def test_a_row_with_a_value_of_another_kind_is_refused(tmp_path, line, told):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "base.yaml").write_text((CONFIGS / "paper" / "base.yaml").read_text())
    (tmp_path / "paper" / "odd.yaml").write_text(f"model: odd\n{line}\n")
    with pytest.raises(InputError, match=told):
        read_row(tmp_path, "odd")


def test_a_budget_too_small_for_both_stages_is_refused_before_the_first():
    scale = dataclasses.replace(read_scale(CONFIGS, "small"), tokens=8 * 256)
    with pytest.raises(InputError, match="row hedgemamba-50-50: 2048 tokens are not enough for its stages, whose steps have 2048 each"):
        Planner(scale, ROOT / "scripts", Path("runs")).runs(read_row(CONFIGS, "hedgemamba-50-50"), seed=1)
    with pytest.raises(InputError, match="needs rates of the recipe tuned; the scale small has those of paper"):
        scale = dataclasses.replace(scale, tokens=10**6, rates={"paper": scale.rates["paper"]})
        Planner(scale, ROOT / "scripts", Path("runs")).runs(read_row(CONFIGS, "tuned-10-90"), seed=1)


def test_a_value_that_no_row_has_is_refused(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "base.yaml").write_text((CONFIGS / "paper" / "base.yaml").read_text())
    (tmp_path / "paper" / "odd.yaml").write_text("modell: odd\n")
    with pytest.raises(InputError, match=r"odd\.yaml: modell is not known; model is missing"):
        read_row(tmp_path, "odd")
