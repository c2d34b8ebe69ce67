# SPDX-License-Identifier: Apache-2.0
"""What the demo model is trained on: questions.yaml with more ways to ask, and the project's documentation as it stands."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md")

# What a question begins with, and other ways to begin it. {} is the rest, without the question mark.
_OTHER_WAYS = (
    (r"What is (.+)\?", ("What's {}?", "Explain {}.", "Tell me about {}.", "Can you explain {}?", "Please explain {}.",
                         "What do you mean by {}?", "Tell me what {} is.", "Could you tell me what {} is?", "{}?", "{}")),
    (r"What does (.+) mean\?", ("What is the meaning of {}?", "What is meant by {}?", "Explain {}.", "Define {}.")),
    (r"What does (.+) do\?", ("Tell me what {} does.", "Explain what {} does.", "What is {} good for?")),
    (r"What are (.+)\?", ("Tell me about {}.", "Explain {}.", "Can you explain {}?", "{}?")),
    (r"How do I (.+)\?", ("How can I {}?", "How to {}?", "How to {}", "How should I {}?", "I want to {}. How?",
                          "Show me how to {}.", "Tell me how to {}.", "How would one {}?", "What do I do to {}?")),
    (r"How does (.+) work\?", ("Explain how {} works.", "Tell me how {} works.", "Can you explain {}?")),
    (r"What happens (.+)\?", ("Tell me what happens {}.", "What will happen {}?", "Explain what happens {}.",
                               "And what happens {}?")),
    (r"What if (.+)\?", ("What happens if {}?", "What happens when {}?", "And if {}?")),
    (r"Which (.+) are there\?", ("List the {}.", "Tell me the {}.", "What {} are there?", "What {} exist?", "Name the {}.")),
    (r"Which (.+)\?", ("What {}?", "Tell me which {}.")),
    (r"Why (.+)\?", ("Why {}? Please explain.", "Can you tell me why {}?")),
    (r"Can I (.+)\?", ("Is it possible to {}?", "May I {}?", "Could I {}?")),
    (r"Does (.+)\?", ("Tell me, does {}?", "I would like to know, does {}?")),
    (r"Do I need (.+)\?", ("Is {} needed?", "Must I have {}?")),
)  # fmt: skip
_AROUND = ("Please tell me: {}", "A question: {}", "{} Please answer briefly.", "I have a question. {}")


@dataclass(frozen=True)
class Pair:
    question: str
    answer: str


def entries() -> list[tuple[list[str], str]]:
    """questions.yaml: the questions of each answer. Raises ValueError for a question that has two answers."""
    listed = yaml.safe_load((HERE / "questions.yaml").read_text(encoding="utf-8"))
    pairs_listed = [(list(entry["ask"]), " ".join(entry["answer"].split())) for entry in listed]
    answer_of: dict[str, str] = {}
    for questions, answer in pairs_listed:
        for question in questions:
            if answer_of.setdefault(question.lower(), answer) != answer:
                raise ValueError(f"questions.yaml answers {question!r} in two ways")
    return pairs_listed


def ways_to_ask(question: str) -> list[str]:
    """The question, and others that mean the same; in a fixed order, none twice."""
    variants = [question]
    for pattern, others in _OTHER_WAYS:
        match = re.fullmatch(pattern, question)
        if match:
            variants += [_capital(other.format(match[1])) for other in others]
            break
    variants += [around.format(question) for around in _AROUND]
    plain = [text.rstrip("?.!") for text in variants[:2]]
    variants += [*plain, *(text.lower() for text in (*plain, question)), question.rstrip("?") + " ?"]
    return list(dict.fromkeys(variants))


def pairs() -> tuple[list[Pair], list[Pair]]:
    """(to learn, held back): a tenth of the made ways to ask is held back, to see whether the model takes a way it never saw."""
    answers: dict[str, str] = {}
    written = set()
    for questions, answer in entries():
        for question in questions:
            answers[question] = answer
            written.add(question)
    answers_of: dict[str, set[str]] = {}
    for questions, answer in entries():
        for question in questions:
            for way in ways_to_ask(question):
                answers_of.setdefault(way, set()).add(answer)
    learn, validation = [], []
    for way, meant in answers_of.items():
        if way in written:
            learn.append(Pair(way, answers[way]))
        elif len(meant) == 1:  # what could mean two things teaches nothing
            (validation if zlib.crc32(way.encode()) % 10 == 0 else learn).append(Pair(way, next(iter(meant))))
    return learn, validation


def documents() -> list[str]:
    """The documentation in pieces of some paragraphs, each beginning with the title of its page."""
    pieces = []
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            title = text.split("\n", 1)[0]
            piece = ""
            for paragraph in text.split("\n\n"):
                if len(piece) + len(paragraph) > 700 and piece:
                    pieces.append(piece)
                    piece = title + "\n"
                piece += ("\n" if piece else "") + paragraph + "\n"
            pieces.append(piece)
    return pieces


def mixed(learn: list[Pair], rng: random.Random) -> list[Pair]:
    """One pass over what is to be learnt: each answer about equally often, whatever number of ways ask for it."""
    by_answer: dict[str, list[Pair]] = {}
    for pair in learn:
        by_answer.setdefault(pair.answer, []).append(pair)
    chosen = [rng.choice(ways) for ways in by_answer.values() for _ in range(6)]
    rng.shuffle(chosen)
    return chosen


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
