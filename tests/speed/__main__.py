"""`python -m tests.speed VERB --option VALUE ...`: measure recapp beside other systems, from the
root of a checkout. `recapp.bench` measures recapp alone.

    kernels     lookup, backward and update in one process; FBGEMM, plain torch, bandwidth
    quantised   lookups of rows in 8 and 4 bits, in one process; FBGEMM, torch, bandwidth
    memory      memory of a backward and its update; nn.EmbeddingBag
    step        the embedding step on several ranks, under plans; TorchRec
    train       a whole training step of a DLRM; TorchRec, its matrix products
    dense       the dense part of any model of conf/model; its matrix products
    dynamic     dynamic tables, which grow; static tables, Python's dict
    inference   latency of an artefact or a checkpoint; nn.EmbeddingBag, TorchRec
    serve       a server under a rising load, in each protocol; JSON rows, its own model
    start       commands from the command line to the first step; another recapp

What is named after the semicolon has turns in the same rounds. Ratios are above 1 where recapp is
faster.
"""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from recapp import console
from recapp.processes.launch import check_gpus, launch
from recapp.settings.records import to_plain

from .lab import DEFAULTS, MEASUREMENTS, Settings, rows_of
from .rivals import check_python


def settings_of(argv=None):
    """Return the settings of a command line."""
    parser = argparse.ArgumentParser("python -m tests.speed", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=MEASUREMENTS)
    for each in fields(Settings):
        if each.name in ("verb", "folder"):
            continue
        kinds = get_args(each.type)
        kind = kinds[0] if kinds else each.type
        more = {"action": "store_true"} if kind is bool else {"type": kind}
        if each.name == "device":
            more["choices"] = ("cpu", "cuda")
        if getattr(each.type, "__origin__", None) is list:
            more["nargs"] = "+"
        parser.add_argument(f"--{each.name}", default=argparse.SUPPRESS, **more)
    given = vars(parser.parse_args(argv))
    return Settings(**{**DEFAULTS.get(given["verb"], {}), **given})


def main(argv=None):
    """Measure, and print the rows of results as JSON."""
    settings = settings_of(argv)
    check_python(settings.torchrec_python)
    if settings.device == "cuda":
        check_gpus(settings.ranks)
    with TemporaryDirectory(prefix="recapp_speed_") as folder:
        settings = replace(settings, folder=folder)
        file = Path(folder) / "settings.yaml"
        file.write_text(json.dumps(to_plain(settings)))
        launch(file, settings.ranks, module=f"{__package__}.lab")
        rows = rows_of(Path(folder))
    console.emit(rows, "json")


if __name__ == "__main__":
    main()
