"""The names of HugeCTR that `recapp.hugectr` has, and the module of recapp that defines each
(`module:name` if the name differs). `docs/from_hugectr.md` lists the differences.
"""

_HOME = "recapp.compat.hugectr.collection"

NAMES = {
    "hugectr.AllReduceAlgo": "recapp.compat.hugectr.words",
    "hugectr.Check_t": "recapp.compat.hugectr.words",
    "hugectr.CommunicationStrategy": "recapp.compat.hugectr.words",
    "hugectr.CompressionStrategy": "recapp.compat.hugectr.words",
    "hugectr.CreateOptimizer": "recapp.compat.hugectr.program_settings",
    "hugectr.CreateSolver": "recapp.compat.hugectr.program_settings",
    "hugectr.DataReaderParams": "recapp.compat.hugectr.program_settings",
    "hugectr.DataReaderSparseParam": "recapp.compat.hugectr.program_settings",
    "hugectr.DataReaderType_t": "recapp.compat.hugectr.words",
    "hugectr.DenseLayer": "recapp.compat.hugectr.graph",
    "hugectr.DeviceLayout": "recapp.compat.hugectr.words",
    "hugectr.EmbeddingCollection": _HOME,
    "hugectr.EmbeddingCollectionConfig": _HOME,
    "hugectr.EmbeddingPlanner": _HOME,
    "hugectr.EmbeddingTableConfig": _HOME,
    "hugectr.EmbeddingTablePlaceHolder": f"{_HOME}:EmbeddingTableConfig",
    "hugectr.Initializer_t": "recapp.compat.hugectr.words",
    "hugectr.Input": "recapp.compat.hugectr.program_settings",
    "hugectr.Layer_t": "recapp.compat.hugectr.words",
    "hugectr.LrPolicy_t": "recapp.compat.hugectr.words",
    "hugectr.MetricsType": "recapp.compat.hugectr.words",
    "hugectr.Model": "recapp.compat.hugectr.program",
    "hugectr.OptParams": "recapp.compat.hugectr.program_settings",
    "hugectr.Optimizer_t": "recapp.compat.hugectr.program_settings",
    "hugectr.Update_t": "recapp.compat.hugectr.program_settings",
    "hugectr.print_plan": _HOME,
    "hugectr.row_rule": "recapp.compat.hugectr.program_settings",
}
"""The module of recapp that defines each name, by the path of the name."""
