"""Proof that an exported folder computes what the trainer computes.

In fp32 first.  Where the logits differ by more than rounding makes of them in most models, fp64 judges: normalisers of features with
signs come near 0, and then the order of a sum in fp32 can move a logit by a tenth in a model that is sound.
"""

# b batch, t seq_len, v vocab_size

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahedge.export.source import StoredModel
from megahedge.models.handover import MAX_PROBE_KL, stream_logits
from megahedge.utils.errors import RunError
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}
"""The judges, in their order."""
PROMPT_LENGTHS = (1, 3, 65, 130)
"""One token; shorter than the convolution; one more than a chunk of the scan; more than two chunks."""
PREFILL = 65
"""Tokens that are read at once before the rest is read one by one, from the cache."""
MAX_TOP1_GAP = 1e-3
"""In fp32, two tokens whose logits differ by less may change places: signed normalisers magnify its rounding to as much."""
MAX_FP64_DIFFERENCE = 1e-7
"""Largest difference of a logit in fp64.  Rounding makes 7e-13 of what in fp32 is 1e-3; a constant rounded to fp32 shows from 1e-8 on."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How the logits of two models agree, on the worst of the ways in which prompts were given."""

    precision: str
    """Of the arithmetic: fp32, or fp64 where that could not tell."""
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
            f"same likeliest token at {agreed} of {self.positions} positions, in {self.precision}"
        )

    @property
    def holds(self) -> bool:
        """Whether the two are the same function.

        In fp32 KL is the measure, as at the hand-over: MAX_PROBE_KL says what rounding makes of it.
        """
        if self.precision == "fp64":
            return self.max_difference <= MAX_FP64_DIFFERENCE
        return self.kl <= MAX_PROBE_KL and self.disagreements == 0


def verify_folder(folder: Path, stored: StoredModel, dtype: torch.dtype) -> Agreement:
    """Load the folder with transformers and compare parameters and logits with those of the checkpoint rounded to `dtype`.

    Raises RunError where they are not the same.
    """
    model = load_exported(folder)
    check_parameters(model, stored, dtype)
    tokens = prompts(stored.config.vocab_size)

    def trainer(precision: str) -> Tensor:
        return stream_logits(stored.config, lambda name: stored.read(name).to(dtype), tokens, _device(precision), PRECISIONS[precision])

    return check_logits(model, tokens, trainer)


def _device(precision: str) -> torch.device:
    """fp64 is for the CPU: its model is twice as large, and not every GPU has that arithmetic."""
    return torch.device("cuda" if precision == "fp32" and torch.cuda.is_available() else "cpu")


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
    loaded = {stored.name_of(name) or name: parameter for name, parameter in model.named_parameters()}
    differing = sorted(loaded.keys() ^ set(stored.names))
    differing += [name for name in stored.names if name in loaded and not torch.equal(loaded[name], stored.read(name).to(dtype).float())]
    if differing:
        raise RunError(f"the export is not sound: {', '.join(differing[:5])} are not what the checkpoint holds; nothing was written")


def prompts(vocab_size: int) -> Tensor:
    """Two fixed sequences [2, max(PROMPT_LENGTHS)] of random tokens; the shorter prompts are their beginnings."""
    return torch.randint(0, vocab_size, (2, max(PROMPT_LENGTHS)), generator=torch.Generator().manual_seed(0))


def check_logits(model: Any, tokens: Tensor, trainer: Callable[[str], Tensor]) -> Agreement:
    """Compare the model's logits with the trainer's, tokens [b, t] being given in all the ways that users give them.

    trainer: from a precision (one of PRECISIONS) to logits [b, t, v].  The model is left in the precision that judged.
    Raises RunError where they do not agree in any, naming the way.
    """
    for precision, dtype in PRECISIONS.items():
        agreements = _compare_ways(model.to(_device(precision), dtype), tokens, trainer(precision).cpu(), precision)
        way, last = list(agreements.items())[-1]
        if last.holds:
            return _worst(list(agreements.values()))
        if precision == "fp32":
            logger.info("prompts %s: %s, be it by rounding or by a fault: fp64 tells", way, last)
    raise RunError(f"the export is not the trainer's model: prompts {way}: {last}; nothing was written")


def _compare_ways(model: Any, tokens: Tensor, expected: Tensor, precision: str) -> dict[str, Agreement]:
    """By the way in which prompts were given, up to the first that does not hold."""
    agreements = {}
    for way, found, wanted in _ways(model, tokens, expected):
        agreements[way] = _compare(found, wanted, precision)
        if not agreements[way].holds:
            break
    return agreements


def _worst(agreements: list[Agreement]) -> Agreement:
    return Agreement(
        precision=agreements[0].precision,
        kl=max(agreement.kl for agreement in agreements),
        max_difference=max(agreement.max_difference for agreement in agreements),
        disagreements=sum(agreement.disagreements for agreement in agreements),
        positions=sum(agreement.positions for agreement in agreements),
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
        output = model(tokens[:, position : position + 1], use_cache=True, **{CACHE_KEYWORD: getattr(output, CACHE_KEYWORD)})
        logits.append(output.logits)
    found = torch.cat(logits, dim=1)
    return found.flatten(0, 1), expected[:, : found.shape[1]].flatten(0, 1)


def _compare(found: Tensor, expected: Tensor, precision: str) -> Agreement:
    """Logits [positions, v]."""
    found, expected = found.cpu().double(), expected.double()
    if found.shape != expected.shape:
        raise RunError(f"the export has logits of shape {list(found.shape)}, the trainer {list(expected.shape)}; nothing was written")
    logp, logq = expected.log_softmax(-1), found.log_softmax(-1)
    likeliest = found.argmax(-1, keepdim=True)
    gaps = expected.amax(-1) - expected.gather(-1, likeliest).squeeze(-1)
    return Agreement(
        precision=precision,
        kl=(logp.exp() * (logp - logq)).sum(-1).mean().item(),
        max_difference=(found - expected).abs().max().item(),
        disagreements=int((gaps > MAX_TOP1_GAP).sum()),
        positions=len(found),
    )
