"""The record of tables and lookups that settings list."""

from recapp.settings.records import record
from recapp.tables.table_settings import ListedTables


def listed(tables, lookups=None):
    return record(ListedTables, {"source": "list", "tables": tables, "lookups": lookups})
