"""What an export is checked for before it gets its name: faults in tensors, config and cache that must be told."""

import pytest
import torch

from megahedge.export import code_files, to_hf, verify
from megahedge.models.families import FAMILIES
from megahedge.models.handover import stream_logits
from megahedge.utils.errors import RunError
from tests.export.small import (
    MIXERS,
    VOCAB_SIZE,
    as_transformers,
    export_of,
    student,
    swap_heads,
    with_faulty_tensors,
)


def _zero(wanted):
    return lambda name, tensor: torch.zeros_like(tensor) if name == wanted else tensor


def _tap_early(name, tensor):
    return tensor.roll(-1, dims=1) if name.endswith("mixer.conv.weight") else tensor


TENSOR_FAULTS = {
    "heads swapped": swap_heads,
    "bias of an output projection zeroed": _zero("blocks.0.mixer.out_proj.bias"),
    "bias of the gate zeroed": _zero("blocks.1.mixer.gate_proj.bias"),
    "rates zeroed": _zero("blocks.0.mixer.decay.rate.weight"),
    "bias of a feature map zeroed": _zero("blocks.0.mixer.key_map.bias"),
    "convolution a tap early": _tap_early,
}
CONFIG_FAULTS = {
    "RoPE on the other side": {"rope_position": "after"},
    "RoPE on other features": {"rotary_pct": 0.5},
    "residual of the other form": {"use_parallel_residual": False},
    "another scale": {"feature_map_scale": True},
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("check", ["parameters", "logits"])
def test_other_parameters_are_refused_by_either_check(check, fault, root, tmp_path, monkeypatch):
    monkeypatch.setattr(to_hf, "save_pretrained", with_faulty_tensors(TENSOR_FAULTS[fault]))
    if check == "logits":
        monkeypatch.setattr(verify, "check_parameters", lambda *_: None)
    with pytest.raises(RunError, match="not what the checkpoint holds" if check == "parameters" else "not the trainer's model"):
        export_of(root, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def near_0():
    """A student whose signed normalisers come so near 0 that fp32's rounding moves logits by a tenth, and its logits by precision.

    Steep maps make one feature nearly 1, whose rotation then decides the sign.
    """
    model = student(MIXERS["paper"], rotary_pct=1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_map.weight"):
                parameter *= 30
    parameters, tokens = dict(model.named_parameters()), verify.prompts(VOCAB_SIZE)
    read = lambda name: parameters[name].detach()  # noqa: E731
    logits = {name: stream_logits(model.config, read, tokens, dtype=dtype) for name, dtype in verify.PRECISIONS.items()}
    return model, tokens, logits


def test_a_student_that_fp32_cannot_judge_is_judged_in_fp64(near_0):
    model, tokens, logits = near_0
    agreement = verify.check_logits(as_transformers(model), tokens, logits.get)
    assert agreement.precision == "fp64" and agreement.holds and "in fp64" in str(agreement)
    rounding = verify._compare(logits["fp32"].flatten(0, 1), logits["fp64"].flatten(0, 1), "fp32")
    assert not rounding.holds  # the trainer's own model in fp32 is as far from itself


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_its_faults_are_refused_all_the_same(fault, near_0):
    model, tokens, logits = near_0
    exported, names = as_transformers(model), FAMILIES[model.config.family]
    faulty = {names.hf_name(name): TENSOR_FAULTS[fault](name, parameter.detach()) for name, parameter in model.named_parameters()}
    exported.load_state_dict(faulty, strict=False)
    with pytest.raises(RunError, match=r"not the trainer's model.*in fp64"):
        verify.check_logits(exported, tokens, logits.get)


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_of_another_function_is_refused(fault, root, tmp_path, monkeypatch):
    original = to_hf.hf_config
    monkeypatch.setattr(to_hf, "hf_config", lambda config: original(config) | CONFIG_FAULTS[fault])
    with pytest.raises(RunError, match="not the trainer's model"):
        export_of(root, tmp_path)
    assert not list(tmp_path.iterdir())


def _forgetting_the_tail(monkeypatch):
    """The code that is written does not keep what the convolution has seen."""
    source = code_files._source
    line = "cache.conv_tails[self.layer_index] = tail"
    monkeypatch.setattr(code_files, "_source", lambda module: source(module).replace(line, "pass"))


def test_a_faulty_cache_is_refused(root, loaded, tmp_path, monkeypatch):
    """Also where transformers has run sound code for a model of this kind before."""
    _forgetting_the_tail(monkeypatch)
    with pytest.raises(RunError, match="token by token, from the cache"):
        export_of(root, tmp_path)
