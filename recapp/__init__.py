"""recapp: from click logs to a trained, evaluated recommender whose embedding tables are sharded over ranks.

Commands are modules: `python -m recapp.train`, `python -m recapp.eval`, `python -m recapp.data`. Every public name has one import
path, the file it lives in; packages export nothing. `recapp/DECISIONS.md` says why things are as they are.
"""

