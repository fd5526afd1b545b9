"""README.md of an exported folder: what the run's records say of the model, and how to load it."""

import json
from collections.abc import Callable
from pathlib import Path

from megahedge.export.source import StoredModel
from megahedge.export.verify import Agreement
from megahedge.utils.logging import get_logger
from megahedge.utils.versions import code_version

logger = get_logger(__name__)

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
{base_model}---

# {name}

{summary}

| | |
|---|---|
{rows}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", padding_side="left"{trust})
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
inputs = tokenizer("The harbour was", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

{notes}
"""
_NOTES = """\
It needs torch and transformers alone; `trust_remote_code` runs the Python files in this folder.
`generate` reads the prompt in chunks and then takes time and memory per token that do not grow with the text.
Padding, wherever it stands, is left out by the attention mask: give the mask, as the tokenizer does.
Two biases are stored as offsets; `hedge_mamba_mixer.py` says which."""


def model_card(stored: StoredModel, name: str, dtype: str, agreement: Agreement | None) -> str:
    """The text for a folder called `name` with weights of `dtype`; no figure that is not in the run's records or measured here."""
    hub = stored.teacher_on_hub()
    is_student = stored.config.mixer.kind != "softmax"
    rows = {
        "model": _shape(stored),
        "in place of attention" if is_student else "mixer": stored.config.mixer.describe(),
        "teacher": _teacher(stored, hub),
        "training": _if_readable(_training, stored),
        "validation": _if_readable(_validation, stored),
        "data": _if_readable(_data, stored),
        "weights": dtype,
        "export": f"logits compared with the trainer's: {agreement}" if agreement else "not compared with the trainer",
        "code": _if_readable(_code, stored),
    }
    if is_student:
        summary = "An attention-free language model, distilled with megahedge from one with softmax attention."
    else:
        summary = "A GPT-NeoX language model, trained with megahedge."
    return _CARD.format(
        name=name,
        base_model=f"base_model: {hub['teacher']}\n" if hub else "",
        summary=summary,
        rows="\n".join(f"| {label} | {text} |" for label, text in rows.items() if text),
        trust=", trust_remote_code=True" if is_student else "",
        notes=_NOTES if is_student else "It is a GPT-NeoX model as transformers knows it.",
    )


def _if_readable(row: Callable[[StoredModel], str | None], stored: StoredModel) -> str | None:
    """What the run's records say, or nothing, with a warning, where they are not as a run writes them: the model is sound without."""
    try:
        return row(stored)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        logger.warning("the model card leaves a row out: records of %s are damaged (%s: %s)", stored.run, type(error).__name__, error)
        return None


def _shape(stored: StoredModel) -> str:
    config = stored.config
    return (
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads of {config.head_dim}, "
        f"MLP {config.intermediate_size}, vocabulary {config.vocab_size}"
    )


def _teacher(stored: StoredModel, hub: dict[str, str]) -> str | None:
    """Its name on the hub, or that of its folder without the way there, which means nothing elsewhere."""
    if hub:
        return " ".join(hub.values())
    return None if stored.teacher is None else Path(stored.teacher).name


def _training(stored: StoredModel) -> str:
    options, progress = stored.run_record().get("options", {}), stored.record.get("progress", {})
    parts = [f"{stored.stage}, {stored.checkpoint.step} steps"]
    if "tokens" in progress:
        parts.append(f"{progress['tokens']:,} tokens")
    named = {"recipe": "recipe {}", "seq_len": "sequences of {}", "global_batch_size": "{} a step", "lr": "learning rate {:g}"}
    parts += [text.format(options[key]) for key, text in named.items() if options.get(key) is not None]
    if options.get("dtype"):
        parts.append(f"computed in {options['dtype']}")
    stage1_steps = stored.record.get("origin", {}).get("stage1_steps")
    if stage1_steps is not None:
        parts.append(f"after {stage1_steps} steps of stage 1")
    return ", ".join(parts)


def _validation(stored: StoredModel) -> str | None:
    """The run's own evaluation of just this step, where it made one."""
    path = stored.run / "metrics.jsonl"
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        if '"eval"' in line and line.endswith("}"):  # a line that a kill cut short has no end
            measured = json.loads(line)
            if (measured["kind"], measured["step"]) == ("eval", stored.checkpoint.step):
                if measured["loss"] is None:  # as it is written where it is not finite
                    return "loss not finite"
                return f"token perplexity {measured['perplexity']:.3f}, loss {measured['loss']:.4f} nats, on {measured['tokens']:,} tokens"
    return None


def _data(stored: StoredModel) -> str | None:
    corpora = stored.record.get("data", {}).get("train", [])
    return "; ".join(f"{Path(c['prefix']).name}, {c['tokens']:,} tokens, index {c['idx_sha256'][:12]}" for c in corpora) or None


def _code(stored: StoredModel) -> str:
    trained, exporting = stored.run_record().get("code"), code_version()
    parts = [f"trained by {_version(trained)}"] if trained else []
    return ", ".join([*parts, f"exported by {_version(exporting)}"])


def _version(code: dict) -> str:
    commit = code.get("git_commit")
    return f"megahedge {code['version']}" + (f" ({commit})" if commit else "")
