"""Runs a planted training with a recorder, and replays its capsule."""

from pathlib import Path
from typing import Any

import torch

import auditor
from auditor.features.watch.recorder import Recorder, inert_recorders
from auditor.features.watch.replay import replay
from auditor.features.watch.result import Replay
from tests.features.watch.plants import PLANTS, Plant


def train(plant: Plant, folder: Path, **how: Any) -> Recorder:
    """Train with a recorder until its first capsule, or to the end."""
    recorder = auditor.watch(plant.model, plant.optimizer, plant.scaler, folder=folder, **how)
    step = recorder.step(plant.step)
    for i in range(plant.steps or plant.at + 40):
        try:
            step(*plant.batch(i))
        except ValueError:
            break
        if recorder.capsules:
            break
    recorder.close()
    return recorder


def replayed(name: str, folder: Path, plants: dict[str, Any] = PLANTS) -> tuple[Recorder, Replay]:
    """Train with a planted failure, and replay its capsule in a newly made model."""
    torch.manual_seed(0)
    recorder = train(plants[name](), folder)
    assert recorder.capsules, "no capsule"
    torch.manual_seed(1)  # other weights than those of the training
    again = plants[name]()
    with inert_recorders() as made:
        auditor.watch(again.model, again.optimizer, again.scaler)
    return recorder, replay(recorder.capsules[0], again.step, name, made)


def is_named(result: Replay, lines: set[str]) -> bool:
    """Whether the replay names a line: as the culprit's, or as that of the first mistake; without lines, the batch."""
    if not lines:
        return result.culprit is None and bool(result.facts)
    named = [result.culprit.line] if result.culprit is not None else []
    named += [one.line for one in result.findings[:1]] if not named or not named[0] else []
    return bool(lines & set(named))


if __name__ == "__main__":
    import random
    import sys
    import tempfile
    import time

    from tests.features.watch import habits
    from tests.features.watch.plants import __file__ as plants_file
    from tests.features.watch.plants import lines_of

    good = 0
    plants = PLANTS
    file = plants_file
    if sys.argv[1:2] == ["habits"]:
        plants = habits.HABITS
        file = habits.__file__
        del sys.argv[1]
    names = sys.argv[1:] or list(plants)
    torch.set_num_threads(1)
    for name in names:
        random.seed(0)
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                recorder, result = replayed(name, Path(folder), plants)
            except Exception as error:
                print(f"{name:40} FAILS {type(error).__name__}: {error}", flush=True)
                if len(names) == 1:
                    raise
                continue
        found = is_named(result, lines_of(name, file))
        good += found
        about = result.about
        is_kind = about.kind in plants[name]().kinds
        state = f"{'kind' if is_kind else 'KIND'} {'reproduced' if result.is_reproduced else 'NOT'} {'named' if found else 'MISSED'}"
        culprit = result.culprit.sentence if result.culprit else "-"
        seconds = time.perf_counter() - begun
        print(
            f"{name:38} {about.step:4} {about.kind:20} {state:26} {seconds:3.0f}s {culprit} {sorted(lines_of(name, file))}",
            flush=True,
        )
        if len(names) == 1:
            print(result)
    print(good, "named of", len(names))
