"""`recapp.train` with the configuration of a test and ranks that train nothing."""

import os
import sys
from pathlib import Path

from recapp import settings, train

settings.conf_dir = lambda: Path(os.environ["STANDIN_CONF"])

if __name__ == "__main__":
    sys.exit(train.main(worker="standin_worker"))
