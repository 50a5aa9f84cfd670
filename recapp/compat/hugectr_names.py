"""The names of HugeCTR that `recapp.hugectr` has, and the module here that defines each
(`module:name` where the name differs). `docs/from_hugectr.md` says what is the same.
"""

_HOME = "recapp.compat.hugectr_collection"

NAMES = {
    "hugectr.CommunicationStrategy": _HOME,
    "hugectr.CompressionStrategy": _HOME,
    "hugectr.CreateOptimizer": "recapp.compat.hugectr_optimizers",
    "hugectr.EmbeddingCollection": _HOME,
    "hugectr.EmbeddingCollectionConfig": _HOME,
    "hugectr.EmbeddingPlanner": _HOME,
    "hugectr.EmbeddingTableConfig": _HOME,
    "hugectr.EmbeddingTablePlaceHolder": f"{_HOME}:EmbeddingTableConfig",
    "hugectr.OptParams": "recapp.compat.hugectr_optimizers",
    "hugectr.Optimizer_t": "recapp.compat.hugectr_optimizers",
    "hugectr.Update_t": "recapp.compat.hugectr_optimizers",
    "hugectr.print_plan": _HOME,
    "hugectr.row_rule": "recapp.compat.hugectr_optimizers",
}
"""Where each name of HugeCTR is at home, by its path."""
