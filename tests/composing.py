"""Settings composed by Hydra, of which each choice of options is composed once a process."""

import pickle
from functools import cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

from recapp.cli import compose as of_product
from recapp.settings.option_files import is_group


def compose(primary, overrides=(), folders=()):
    """What `recapp.cli.compose.compose` returns, but for the record of single settings among
    Hydra's own. The first call with these options reads files of `conf/` and merges them; single
    settings are applied by every call, as Hydra applies them. Files of other folders may change.
    """
    if folders:
        return of_product.compose(primary, overrides, folders)
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    options = [each.input_line for each in parsed if is_group(each.key_or_group)]
    composed = pickle.loads(_options(primary, tuple(options)))
    settings = [each for each in parsed if not is_group(each.key_or_group)]
    ConfigLoaderImpl._apply_overrides_to_config(settings, composed)
    return composed


@cache
def _options(primary, options):
    """The settings before single ones are applied, pickled: a copy is made sooner so."""
    return pickle.dumps(of_product.compose(primary, options))
