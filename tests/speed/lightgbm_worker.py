"""Boosted trees in a Python of their own: `python lightgbm_worker.py FILE.npz SEED`.

    FILE.npz        arrays of chosen rows and of all rows -> a grid, chosen on the last tenth
    standard output {"leaves": 31, "rounds": 240, "seconds": 12.3, ...}
    FILE.npy        the scores of the measured rows

This file imports nothing of recapp: the Python of the user has LightGBM and numpy.
"""

import json
import sys
import time

import lightgbm
import numpy as np

LEAVES = (15, 31, 63)
RATE = 0.05
MOST_ROUNDS = 1000
PATIENCE = 50


def parameters(leaves: int, seed: int) -> dict[str, object]:
    """Return the parameters of a model."""
    return {
        "objective": "binary",
        "metric": "auc",
        "learning_rate": RATE,
        "num_leaves": leaves,
        "feature_fraction": 0.8,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "num_threads": 1,
        "verbosity": -1,
        "seed": seed,
    }


def peak_bytes() -> int:
    """Return the largest memory of this process. getrusage would count that of the process that
    started it, too: Linux keeps it over exec.
    """
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main(path: str, seed: int) -> dict[str, object]:
    """Choose leaves and rounds, by seed 1, and train on all training rows."""
    with np.load(path) as given:
        arrays = {name: given[name] for name in given.files}
    chosen = (-1.0, 0, 0)
    for leaves in LEAVES:
        fit = lightgbm.Dataset(arrays["x_fit"], arrays["y_fit"])
        last = lightgbm.Dataset(arrays["x_last"], arrays["y_last"], reference=fit)
        stop = lightgbm.early_stopping(PATIENCE, verbose=False)
        model = lightgbm.train(
            parameters(leaves, 1), fit, MOST_ROUNDS, valid_sets=[last], callbacks=[stop]
        )
        score = model.best_score["valid_0"]["auc"]
        chosen = max(chosen, (score, leaves, model.best_iteration))
    _, leaves, rounds = chosen
    began = time.perf_counter()
    rows = lightgbm.Dataset(arrays["x_train"], arrays["y_train"])
    model = lightgbm.train(parameters(leaves, seed), rows, rounds)
    seconds = time.perf_counter() - began
    np.save(path.replace(".npz", ".npy"), model.predict(arrays["x_val"]))
    return {
        "leaves": leaves,
        "rounds": rounds,
        "configurations": len(LEAVES),
        "peak_bytes": peak_bytes(),
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
