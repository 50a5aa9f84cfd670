"""`recapp.train` with the configuration of a test and ranks that train nothing."""

import os
import sys
from pathlib import Path

import standin_conf

from recapp import train
from recapp.recipe import commands
from recapp.settings import option_files

commands.COMMANDS.update(standin_conf.COMMANDS)
option_files.conf_dir = lambda: Path(os.environ["STANDIN_CONF"])

if __name__ == "__main__":
    sys.exit(train.main(worker="standin_worker"))
