"""The names of HugeCTR that `recapp.hugectr` has, and the module of recapp that defines each
(`module:name` if the name differs). `docs/from_hugectr.md` lists the differences.
"""

_HOME = "recapp.compat.hugectr_collection"

NAMES = {
    "hugectr.AllReduceAlgo": "recapp.compat.hugectr_arguments",
    "hugectr.Check_t": "recapp.compat.hugectr_arguments",
    "hugectr.CommunicationStrategy": "recapp.compat.hugectr_arguments",
    "hugectr.CompressionStrategy": "recapp.compat.hugectr_arguments",
    "hugectr.CreateOptimizer": "recapp.compat.hugectr_solver",
    "hugectr.CreateSolver": "recapp.compat.hugectr_solver",
    "hugectr.DataReaderParams": "recapp.compat.hugectr_reader",
    "hugectr.DataReaderSparseParam": "recapp.compat.hugectr_reader",
    "hugectr.DataReaderType_t": "recapp.compat.hugectr_arguments",
    "hugectr.DenseLayer": "recapp.compat.hugectr_graph",
    "hugectr.DeviceLayout": "recapp.compat.hugectr_arguments",
    "hugectr.EmbeddingCollection": _HOME,
    "hugectr.EmbeddingCollectionConfig": _HOME,
    "hugectr.EmbeddingPlanner": _HOME,
    "hugectr.EmbeddingTableConfig": _HOME,
    "hugectr.EmbeddingTablePlaceHolder": f"{_HOME}:EmbeddingTableConfig",
    "hugectr.Initializer_t": "recapp.compat.hugectr_arguments",
    "hugectr.Input": "recapp.compat.hugectr_reader",
    "hugectr.Layer_t": "recapp.compat.hugectr_arguments",
    "hugectr.LrPolicy_t": "recapp.compat.hugectr_arguments",
    "hugectr.MetricsType": "recapp.compat.hugectr_arguments",
    "hugectr.Model": "recapp.compat.hugectr_model",
    "hugectr.OptParams": "recapp.compat.hugectr_solver",
    "hugectr.Optimizer_t": "recapp.compat.hugectr_solver",
    "hugectr.Update_t": "recapp.compat.hugectr_solver",
    "hugectr.print_plan": _HOME,
    "hugectr.row_rule": "recapp.compat.hugectr_solver",
}
"""The module of recapp that defines each name, by the path of the name."""
