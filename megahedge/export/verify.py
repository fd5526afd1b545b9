"""Proof that an exported folder computes what the trainer computes."""

# b batch, t seq_len, v vocab_size

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahedge.export.source import StoredModel
from megahedge.models.families import FAMILIES
from megahedge.models.handover import MAX_PROBE_KL, stream_logits
from megahedge.utils.errors import RunError

PROMPT_LENGTHS = (1, 3, 65, 130)
"""One token; shorter than the convolution; one more than a chunk of the scan; more than two chunks."""
PREFILL = 65
"""Tokens that are read at once before the rest is read one by one, from the cache."""
MAX_TOP1_GAP = 1e-3
"""Two tokens whose logits differ by less may change places: signed normalisers magnify fp32's rounding to as much."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How the logits of two models agree, on the worst of the ways in which prompts were given."""

    kl: float
    """Mean KL(trainer ‖ export) in nats a token."""
    max_difference: float
    """Largest difference between two logits."""
    disagreements: int
    """Positions whose likeliest token is another one, near ties not counted."""
    positions: int
    """Positions compared."""

    def __str__(self) -> str:
        agreed = self.positions - self.disagreements
        return (
            f"KL {self.kl:.2g} nats a token, largest difference of a logit {self.max_difference:.2g}, "
            f"same likeliest token at {agreed} of {self.positions} positions"
        )

    @property
    def holds(self) -> bool:
        """Whether the two are the same function.  KL is the measure, as at the hand-over: MAX_PROBE_KL says what rounding makes of it."""
        return self.kl <= MAX_PROBE_KL and self.disagreements == 0


def verify_folder(folder: Path, stored: StoredModel, dtype: torch.dtype) -> Agreement:
    """Load the folder with transformers and compare parameters and, in fp32, logits with those of the checkpoint rounded to `dtype`.

    Raises RunError where they are not the same.
    """
    model = load_exported(folder)
    check_parameters(model, stored, dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = prompts(stored.config.vocab_size)
    expected = stream_logits(stored.config, lambda name: stored.read(name).to(dtype).float(), tokens, device).cpu()
    return check_logits(model.to(device), tokens, expected)


def load_exported(folder: Path) -> Any:
    """What transformers makes of the folder, in fp32.  Raises RunError if a parameter does not come from the files."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
    faults = {kind: names for kind, names in info.items() if kind.endswith("_keys") and names}
    if faults:
        raise RunError(f"the export is not sound: transformers finds {faults}; nothing was written")
    return model.eval()


def check_parameters(model: Any, stored: StoredModel, dtype: torch.dtype) -> None:
    """Raise RunError unless the loaded model has exactly the checkpoint's parameters, rounded to `dtype`."""
    family = FAMILIES[stored.config.family]
    loaded = {family.canonical_name(name): parameter for name, parameter in model.named_parameters()}
    ours = {family.hf_name(name): name for name in stored.names}
    differing = sorted(loaded.keys() ^ ours.keys())
    differing += [name for name in ours if name in loaded and not torch.equal(loaded[name], stored.read(ours[name]).to(dtype).float())]
    if differing:
        raise RunError(f"the export is not sound: {', '.join(differing[:5])} are not what the checkpoint holds; nothing was written")


def prompts(vocab_size: int) -> Tensor:
    """Two fixed sequences [2, max(PROMPT_LENGTHS)] of random tokens; the shorter prompts are their beginnings."""
    return torch.randint(0, vocab_size, (2, max(PROMPT_LENGTHS)), generator=torch.Generator().manual_seed(0))


def check_logits(model: Any, tokens: Tensor, expected: Tensor) -> Agreement:
    """Compare the model's logits with expected [b, t, v], tokens [b, t] being given in all the ways that users give them.

    Raises RunError where they do not agree, naming the way.
    """
    agreements = []
    for way, found, wanted in _ways(model, tokens, expected):
        agreement = _compare(found, wanted)
        if not agreement.holds:
            raise RunError(f"the export is not the trainer's model: prompts {way}: {agreement}; nothing was written")
        agreements.append(agreement)
    return Agreement(
        max(agreement.kl for agreement in agreements),
        max(agreement.max_difference for agreement in agreements),
        0,
        sum(agreement.positions for agreement in agreements),
    )


@torch.no_grad()
def _ways(model: Any, tokens: Tensor, expected: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name of a way to give prompts, and logits found and expected [positions, v]."""
    device = next(model.parameters()).device
    tokens = tokens.to(device)
    for length in PROMPT_LENGTHS:
        yield f"of length {length}", model(tokens[:, :length]).logits.flatten(0, 1), expected[:, :length].flatten(0, 1)
    yield "in one batch, padded on the left", *_padded(model, tokens, expected)
    yield "token by token, from the cache", *_cached(model, tokens, expected)


def _padded(model: Any, tokens: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    longest = tokens.shape[1]
    batch, mask = tokens.new_zeros(len(PROMPT_LENGTHS), longest), tokens.new_zeros(len(PROMPT_LENGTHS), longest)
    for row, length in enumerate(PROMPT_LENGTHS):
        batch[row, longest - length :], mask[row, longest - length :] = tokens[0, :length], 1
    logits = model(batch, attention_mask=mask).logits
    return logits[mask.bool()], torch.cat([expected[0, :length] for length in PROMPT_LENGTHS])


def _cached(model: Any, tokens: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    from megahedge.export.modeling_hedge_mamba import CACHE_KEYWORD

    output = model(tokens[:, :PREFILL], use_cache=True)
    logits = [output.logits]
    for position in range(PREFILL, PREFILL + 8):
        output = model(tokens[:, position : position + 1], use_cache=True, **{CACHE_KEYWORD: output[CACHE_KEYWORD]})
        logits.append(output.logits)
    found = torch.cat(logits, dim=1)
    return found.flatten(0, 1), expected[:, : found.shape[1]].flatten(0, 1)


def _compare(found: Tensor, expected: Tensor) -> Agreement:
    """Logits [positions, v]."""
    found, expected = found.cpu().double(), expected.double()
    if found.shape != expected.shape:
        raise RunError(f"the export has logits of shape {list(found.shape)}, the trainer {list(expected.shape)}; nothing was written")
    logp, logq = expected.log_softmax(-1), found.log_softmax(-1)
    likeliest = found.argmax(-1, keepdim=True)
    gaps = expected.amax(-1) - expected.gather(-1, likeliest).squeeze(-1)
    return Agreement(
        kl=(logp.exp() * (logp - logq)).sum(-1).mean().item(),
        max_difference=(found - expected).abs().max().item(),
        disagreements=int((gaps > MAX_TOP1_GAP).sum()),
        positions=len(found),
    )
