"""A few made-up rows of each task of the paper, in the fields that lm-eval's own task files read."""

import json
from pathlib import Path

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve")
COLORS = ("red", "green", "blue", "grey")


def _rows(number: int) -> dict[str, dict]:
    """One row of each task, by the name of its file."""
    name, right = NAMES[number], number % 4
    choices = [f"{color} {number}" for color in COLORS]
    arc = {"question": f"Which door did {name} take?", "choices": {"text": choices, "label": list("ABCD")}, "answerKey": "ABCD"[right]}
    problems = [
        {"question": f"{name} lives in  _  .", "answer": "A", "options": ["town", "a tree", "a boat", "a tent"]},
        {"question": "What was the door?", "answer": "ABCD"[right], "options": choices},
    ]
    return {
        "arc_easy": arc,
        "arc_challenge": arc | {"choices": {"text": choices[:3], "label": list("ABC")}, "answerKey": "ABC"[number % 3]},
        "social_iqa": {
            "context": f"{name} left.",
            "question": "Why?",
            **dict(zip(("answerA", "answerB", "answerC"), choices[:3], strict=True)),
            "label": str(1 + number % 3),
        },
        "piqa": {"goal": f"open door {number}", "sol1": "push", "sol2": "paint it over", "label": number % 2},
        "hellaswag": {
            "activity_label": "Opening doors",
            "ctx_a": f"{name} stands there.",
            "ctx_b": "she",
            "endings": choices,
            "label": str(right),
        },
        "lambada_openai": {"text": f"{name} took the {COLORS[right]} key, and the door was {COLORS[right]}"},
        "boolq": {"passage": f"The door of {name} is red.", "question": "is the door red", "label": number % 2},
        "race_made_up": {"article": f"{name} opened a door.", "problems": str(problems)},
        "logiqa_test": {"context": f"{name} knows.", "question": "What?", "options": choices, "label": "abcd"[right]},
        "winogrande": {
            "sentence": f"{name} saw the key and the door, but _ was {COLORS[right]}.",
            "option1": "the key",
            "option2": "the door",
            "answer": str(1 + number % 2),
        },
    }


def write_rows(folder: Path, count: int = len(NAMES)) -> Path:
    """JSON lines for all tasks of the paper."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_rows(number) for number in range(count)]
    for name in rows[0]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row[name]) + "\n" for row in rows))
    return folder
