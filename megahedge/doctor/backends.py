"""Which backends `auto` takes on this device, for each structure of a scan and for the convolution, and why it is none of the others."""

from collections.abc import Mapping

import torch

from megahedge.config.mixer import STEP_AXES
from megahedge.doctor.report import Section
from megahedge.kernels.conv_problem import ConvBackend, ConvProblem
from megahedge.kernels.conv_registry import CONV_BACKENDS
from megahedge.kernels.problem import Backend, Problem
from megahedge.kernels.registry import BACKENDS
from megahedge.utils.packages import Broken

_AXES = {"head": "shared", "state": "state", "channel": "channel"}
"""A step's axis by the option's word for it (--decay_step)."""


def look_at_backends(section: Section, head_dim: int) -> None:
    """Scans of training; one row a structure, then one a backend and reason."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    section.figures |= {
        "scan": _look_at_registry(section, "scan", BACKENDS, scan_problems(device, head_dim)),
        "convolution": _look_at_registry(section, "convolution", CONV_BACKENDS, conv_problems(device, head_dim)),
    }


def scan_problems(device: str, head_dim: int) -> dict[str, Problem]:
    """Every scan that the options of a mixer can ask training for, in fp32 as all of them run, by its description."""
    fixed = {
        "normalize": True,
        "state_size": 2 * head_dim,
        "head_dim": head_dim,
        "device": device,
        "dtype": torch.float32,
        "needs_grad": True,
    }
    found = {"no decay": Problem(structure="none", step_axis=None, **fixed)}
    for structure, axes in STEP_AXES.items():
        for axis in axes:
            found[f"decay by {structure}, step by {axis}"] = Problem(structure=structure, step_axis=_AXES[axis], **fixed)
    return found


def conv_problems(device: str, head_dim: int) -> dict[str, ConvProblem]:
    """The convolution of training, with the paper's number of taps."""
    problem = ConvProblem(num_taps=4, num_channels=head_dim, device=device, dtype=torch.bfloat16, boundaries=True, initial=False)
    return {"causal convolution": problem}


def _look_at_registry(
    section: Section,
    kind: str,
    backends: Mapping[str, Backend] | Mapping[str, ConvBackend],
    problems: Mapping[str, Problem] | Mapping[str, ConvProblem],
) -> dict:
    """Rows for a registry of backends, of which `auto` takes the first that accepts a problem; the same as figures."""
    reasons = {name: {label: backend.supports(problem) for label, problem in problems.items()} for name, backend in backends.items()}
    chosen = {label: next(name for name in backends if reasons[name][label] is None) for label in problems}
    for label, name in chosen.items():
        section.row(label, name)
    for name, by_label in reasons.items():
        _tell_why_not(section, kind, name, {label: reason for label, reason in by_label.items() if chosen[label] != name})
    return {"chosen": chosen, "reasons": reasons}


def _tell_why_not(section: Section, kind: str, name: str, reasons: dict[str, str | None]) -> None:
    """One row for each reason why a backend is not taken, with the problems that it holds for unless these are all."""
    for reason in dict.fromkeys(reasons.values()):
        labels = [label for label, other in reasons.items() if other == reason]
        where = "" if len(labels) == len(reasons) else f" ({'; '.join(labels)})"
        section.row(f"not {name}", f"{reason or 'could, and a faster one does'}{where}")
        if isinstance(reason, Broken):
            section.warnings.append(f"the faster {kind} backend {name} is left out: {reason}")
