"""recapp: from click logs to a trained, evaluated recommender whose embedding tables are sharded
over ranks.

Commands are modules: `python -m recapp.train`, `recapp.eval`, `recapp.plan`, `recapp.report`,
`recapp.bench`. Every public name has one import path, the file it lives in; packages export
nothing. `docs/decisions.md` says why things are as they are.
"""
