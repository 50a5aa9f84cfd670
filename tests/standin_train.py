"""`recapp.train` with the configuration of a test and ranks that train nothing."""

import os
import sys
from pathlib import Path

import standin_conf

from recapp import train
from recapp.settings import option_files

standin_conf.install(setattr)
option_files.conf_dir = lambda: Path(os.environ["STANDIN_CONF"])

if __name__ == "__main__":
    sys.exit(train.main(worker="standin_worker"))
