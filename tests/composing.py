"""Settings composed by Hydra, of which each choice of options is composed once a process."""

import copy
from functools import cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

from recapp.cli import compose as of_product
from recapp.settings.option_files import is_group


def compose(primary, overrides=(), folders=()):
    """What `recapp.cli.compose.compose` returns, but for the record of single settings among
    Hydra's own: files are read and merged by the first call with these options, single settings
    are applied by every call as Hydra applies them.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    options = [each for each in parsed if is_group(each.key_or_group, folders)]
    composed = copy.deepcopy(
        _options(primary, tuple(each.input_line for each in options), tuple(folders))
    )
    settings = [each for each in parsed if each not in options]
    ConfigLoaderImpl._apply_overrides_to_config(settings, composed)
    return composed


_options = cache(of_product.compose)
