"""`python -m tests.gpu_first`: see the package."""

import argparse
import json
import os

from recapp.processes.launch import gpu_count


def main(argv=None):
    """Print the counts of a step, or the figures of a GPU, as JSON."""
    parser = argparse.ArgumentParser("python -m tests.gpu_first")
    parser.add_argument("--counts", action="store_true", help="count a step: needs no GPU")
    if parser.parse_args(argv).counts:
        os.environ["TRITON_INTERPRET"] = "1"  # read where triton is imported
        from .counts import counted_rows

        print(json.dumps({"rows": counted_rows()}, indent=1))
    elif gpu_count():
        from . import on_card

        on_card.main()
    else:
        print("no GPU: --counts needs none")


if __name__ == "__main__":
    main()
