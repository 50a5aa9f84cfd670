"""`python -m tests.gpu_first`: see the package."""

import argparse
import json
import os

from recapp.processes.launch import gpu_count


def main(argv=None):
    """Print the counts of a step, or the figures of a GPU, as JSON."""
    parser = argparse.ArgumentParser("python -m tests.gpu_first")
    parser.add_argument("--counts", action="store_true", help="count a step: needs no GPU")
    parser.add_argument("--list", action="store_true", help="list the cases: needs no GPU")
    parser.add_argument("--seconds", type=float, default=300, help="of all cases together")
    parser.add_argument("--only", nargs="+", default=(), metavar="CASE", help="run these cases")
    parser.add_argument("--file", help="append each line to this file, too")
    given = parser.parse_args(argv)
    if given.counts:
        os.environ["TRITON_INTERPRET"] = "1"  # read where triton is imported
        from tests.interpreter import quicken

        from .counts import counted_rows

        quicken()
        print(json.dumps({"rows": counted_rows()}, indent=1))
    elif given.list:
        from .on_card import cases

        for case in cases():
            print(f"{case.limit:4} s  {case.name:22} python {' '.join(case.arguments)}")
    elif gpu_count():
        from . import on_card

        on_card.main(given.seconds, given.only, given.file)
    else:
        print("no GPU: --counts needs none")


if __name__ == "__main__":
    main()
