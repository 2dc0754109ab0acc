"""The verdict on a job's history, from what its processes wrote down: nothing lost, nothing twice, one truth.

Knows nothing of the protocol: journals (every life of every rank), and the turns of the training loops."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    if not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue  # torn by a kill
    return found


def journals_of(directory: Path) -> dict[str, list[Line]]:
    """REPLICA/RANK -> its lines."""
    found = {f"{path.stem}/0": read_lines(path) for path in directory.glob("*.jsonl")}
    for path in directory.glob("ranks/*.jsonl"):
        replica, _, rank = path.stem.rpartition(".")
        found[f"{replica}/{rank}"] = read_lines(path)
    return found


def truths(journals: dict[str, list[Line]]) -> list[str]:
    """Problems: a step that was committed in two ways, or by nobody whose journal is here."""
    said: dict[int, dict[str, str]] = defaultdict(dict)
    batches: dict[int, Counter[str]] = defaultdict(Counter)
    for name, lines in journals.items():
        for line in of_kind(lines, "step"):
            truth = [line["term"], line["epoch"], line["contributors"], line["verdict"]]
            said[line["step"]].setdefault(json.dumps(truth), name)
            if not line["replayed"]:
                batches[line["step"]][json.dumps(line["batches"], sort_keys=True)] += 1
    problems = [f"step {step} was committed in two ways: {ways}" for step, ways in said.items() if len(ways) > 1]
    problems += [f"step {step} with two sets of batches: {ways}" for step, ways in batches.items() if len(ways) > 1]
    missing = sorted(set(range(1, max(said, default=0) + 1)) - set(said))
    return problems + ([f"steps {missing} are in no journal"] if missing else [])


def applied(journals: dict[str, list[Line]]) -> list[str]:
    """Problems: a life of a rank that went back. (It may go forward by more than one: a state that was fetched.)"""
    problems = []
    for name, lines in journals.items():
        lives: dict[int, list[int]] = defaultdict(list)
        for line in of_kind(lines, "step"):
            lives[line["incarnation"]].append(line["step"])
        for life, steps in lives.items():
            back = [(a, b) for a, b in pairwise(steps) if b <= a]
            problems += [f"{name} in its life {life} applied step {b} after step {a}" for a, b in back]
    return problems


def data(journals: dict[str, list[Line]], last: int) -> list[str]:
    """Problems: a batch that was trained twice, or never although later ones were. Steps up to `last`."""
    trained: Counter[int] = Counter()
    seen: set[int] = set()
    for name, lines in journals.items():
        if name.endswith("/0"):
            for line in of_kind(lines, "step"):
                if not line["replayed"] and line["step"] not in seen and line["step"] <= last:
                    seen.add(line["step"])
                    trained.update(line["batches"].values())
    problems = [f"batch {batch} was trained {times} times" for batch, times in trained.items() if times > 1]
    missing = sorted(set(range(max(trained, default=-1) + 1)) - set(trained))
    return problems + ([f"batches {missing} were never trained"] if missing else [])


def recomputed(turns: Iterable[Path]) -> list[str]:
    """Problems: a process whose loop ran twice for one step."""
    problems = []
    for path in turns:
        if path.exists():
            twice = [line for line, times in Counter(path.read_text().split("\n")[:-1]).items() if times > 1]
            problems += [f"{path.stem}: process and step {line} twice" for line in twice]
    return problems


def same_bits(journals: dict[str, list[Line]], names: Sequence[str], codes: Sequence[int] = (0,)) -> list[str]:
    """Problems: those ranks (all of one number) that did not end at one step with the same bits."""
    problems = []
    final = max((line["step"] for name in names for line in of_kind(journals[name], "end")), default=0)
    by_rank: dict[str, set[tuple[int, str, str]]] = defaultdict(set)
    for name in names:
        last = next((line for line in reversed(journals[name]) if line["kind"] in ("start", "end")), None)
        if last is None or last["kind"] != "end" or last["exit_code"] not in codes:
            problems.append(f"{name} did not end with its job: {last}")
            continue
        if last["exit_code"] != 0 and last["step"] < final:
            continue  # a spare that was sent away before it had the last step: it contributed nothing to it
        by_rank[name.rpartition("/")[2]].add((last["step"], last["params_digest"], last["optimizer_digest"]))
    return problems + [f"rank {rank} ended with {bits}" for rank, bits in by_rank.items() if len(bits) > 1]


def of_kind(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]
