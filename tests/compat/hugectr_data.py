"""What NVTabular's preprocessing leaves: Parquet, `_file_list.txt` with paths of another machine,
`_metadata.json`.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_nvtabular(folder, sizes, *, rows, files=2, dense=13, seed=1, hotness=1):
    """Write clicks of 3.2 %, numbers and one column of keys 0..size-1 for each size.

    Args:
        folder: Where they are written.
        sizes: How many keys each column has.
        rows: Of all files together.
        files: How many files.
        dense: How many columns of numbers.
        seed: Of what is drawn.
        hotness: Keys of a sample; above 1 columns hold lists.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    conts = [f"I{k + 1}" for k in range(dense)]
    cats = [f"C{k + 1}" for k in range(len(sizes))]
    each = rows // files
    for number in range(files):
        columns = {"click": (rng.random(each) < 0.032).astype(np.float32)}
        columns |= {name: rng.random(each, dtype=np.float32) for name in conts}
        for name, size in zip(cats, sizes, strict=True):
            keys = rng.integers(0, size, (each, hotness))
            columns[name] = keys[:, 0] if hotness == 1 else list(keys)
        pq.write_table(pa.table(columns), folder / f"part_{number}.parquet")
    paths = [f"/raid/somebody/{folder.name}/part_{number}.parquet" for number in range(files)]
    (folder / "_file_list.txt").write_text("\n".join([str(files), *paths]) + "\n")
    order = ["click", *conts, *cats]

    def entries(names):
        return [{"col_name": name, "index": order.index(name)} for name in names]

    stats = [{"file_name": f"part_{k}.parquet", "num_rows": each} for k in range(files)]
    said = {"file_stats": stats, "labels": entries(["click"])}
    said |= {"conts": entries(conts), "cats": entries(cats)}
    (folder / "_metadata.json").write_text(json.dumps(said))
